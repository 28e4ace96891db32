"""RoPE and the cache's append of models of transformers by our op: where, and what they compute."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import transformers
from compat_sizes import TWO_LAYERS
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    DynamicCache,
    Gemma2Config,
    Gemma2ForCausalLM,
    GemmaConfig,
    GemmaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    NemotronConfig,
    NemotronForCausalLM,
    OlmoConfig,
    OlmoForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.models.llama.modeling_llama import LlamaAttention

from ostinato import ops
from ostinato.compat.transformers import NAME, RaggedStaticCache, replace_attention
from ostinato.compat.transformers.interface import attention
from ostinato.graphs import BufferSpec, GraphRunner, StaticBuffers
from ostinato.jit.errors import MissingKernelError

transformers.logging.set_verbosity_error()

SIZES: dict[str, Any] = {**TWO_LAYERS, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
SLIDING: dict[str, Any] = {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 7}
# Those that are replaced: with windows in all layers or one, biases, and RoPE of half a head.
MODELS: dict[str, Any] = {
    "llama": (LlamaForCausalLM, LlamaConfig(**SIZES)),
    "biases": (LlamaForCausalLM, LlamaConfig(**SIZES, attention_bias=True)),
    "mistral": (MistralForCausalLM, MistralConfig(**SIZES, sliding_window=7)),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**SIZES, **SLIDING)),
    "gemma": (GemmaForCausalLM, GemmaConfig(**SIZES)),
    "nemotron": (NemotronForCausalLM, NemotronConfig(**SIZES)),
    "olmo": (OlmoForCausalLM, OlmoConfig(**SIZES)),
}
OTHERS: dict[str, Any] = {
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**SIZES)),  # norms of q and k
    "gemma2": (Gemma2ForCausalLM, Gemma2Config(**SIZES)),  # a softcap
    "cohere": (CohereForCausalLM, CohereConfig(**SIZES)),  # pairs of neighbours
    "olmo-clip": (OlmoForCausalLM, OlmoConfig(**SIZES, clip_qkv=8.0)),
}
LAYERS = [f"model.layers.{i}.self_attn" for i in range(2)]
FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def make(name: str, **changes: Any) -> Any:
    """Return a model that attends by ours, and whose attention matters to its outputs."""
    kind, config = {**MODELS, **OTHERS}[name]
    config = copy.deepcopy(config)
    for key, value in changes.items():
        setattr(config, key, value)
    model = kind(config).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter), alpha=0.05)
    model.set_attn_implementation(NAME)
    return model


def texts(model: Any, steps: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logits of prompts and of steps of the same tokens, and what is in the cache."""
    generator = torch.Generator().manual_seed(1)
    cache = RaggedStaticCache(model, max_batch=5, max_length=17)
    cache.storage.fill_(float("nan"))
    seq_lens, tokens = torch.tensor([9, 0, 4, 1], dtype=torch.int32, device=model.device), 9
    real, logits = seq_lens > 0, []
    for _ in range(1 + steps):
        rows = cache.rows(seq_lens, tokens=tokens)
        ids = torch.randint(97, (4, tokens), generator=generator).to(model.device)
        out = model(ids, past_key_values=rows, position_ids=rows.position_ids).logits
        logits.append(out[real, -1].float())
        seq_lens, tokens = seq_lens + real.int(), 1
    assert cache.storage[:, :, [1, 4]].isnan().all()
    return torch.stack(logits), cache.storage.float()


@pytest.mark.parametrize("name", [*MODELS, *OTHERS])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_layers_that_are_replaced(name: str, dtype: torch.dtype) -> None:
    model = make(name).to(dtype)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random_numbers = torch.get_rng_state()
    assert replace_attention(model) == (LAYERS if name in MODELS else [])
    assert replace_attention(model) == []
    assert torch.equal(random_numbers, torch.get_rng_state())
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert model.config._attn_implementation == NAME


def test_they_are_replaced_before_the_model_attends_by_ours() -> None:
    model = make("llama")
    model.set_attn_implementation("sdpa")
    assert replace_attention(model.train()) == LAYERS


class OddAttention(LlamaAttention):
    """Llama's attention in name, that does something else in one place."""

    def __init__(self, how: str) -> None:
        super().__init__(copy.deepcopy(MODELS["llama"][1]), layer_idx=1)
        self.how = how

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: Any = None,
        attention_mask: Any = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> Any:
        given: Any = {"past_key_values": past_key_values, **kwargs}
        if self.how == "scaled":
            hidden_states = hidden_states * 1.01
        if self.how == "large":
            hidden_states = hidden_states.clamp(-1000, 1000)
        if self.how == "other angles":
            position_embeddings = (position_embeddings[0], -position_embeddings[1])
        if self.how == "by position" and given["position_ids"].max() > 8192:
            hidden_states = hidden_states * 2
        if self.how == "no mask":
            attention_mask = attention_mask.clone()[:1]
        if self.how == "no lengths":
            given["seq_lens"] = None
        if self.how == "no cache":
            given["past_key_values"] = None
        if self.how == "softcap":
            given["softcap"] = 50.0
        if self.how == "raises":
            raise RuntimeError("not for such numbers")
        out, weights = super().forward(hidden_states, position_embeddings, attention_mask, **given)
        return (out * 1.01 if self.how == "out" else out), weights


class GatedAttention(LlamaAttention):
    def forward(self, hidden_states: torch.Tensor, gate: Any = None, **kwargs: Any) -> Any:  # type: ignore[override]
        return super().forward(hidden_states, **kwargs)


@pytest.mark.parametrize(
    "how",
    [
        "scaled",
        "large",
        "other angles",
        "by position",
        "no mask",
        "no lengths",
        "no cache",
        "softcap",
        "raises",
        "out",
    ],
)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_layers_in_name_only_are_left_alone(how: str, dtype: torch.dtype) -> None:
    assert replace_attention(OddAttention(how).to(dtype)) == []


def test_other_layers_that_are_left_alone() -> None:
    assert replace_attention(OddAttention("as Llama")) == [""]
    assert replace_attention(GatedAttention(MODELS["llama"][1], 0)) == []
    assert replace_attention(OddAttention("as Llama").double()) == []
    assert replace_attention(OddAttention("as Llama").to("meta")) == []
    assert replace_attention(torch.nn.MultiheadAttention(16, 2)) == []
    hooked: Any = OddAttention("as Llama")
    hooked.forward = lambda x: x + 1
    assert replace_attention(hooked) == []
    more: Any = OddAttention("as Llama")
    more.q_norm = torch.nn.Identity()
    assert replace_attention(more) == []
    less: Any = OddAttention("as Llama")
    del less.scaling
    assert replace_attention(less) == []
    with pytest.raises(TypeError, match=r"model: got str, expected a torch.nn.Module"):
        replace_attention("model")  # type: ignore[arg-type]


def test_a_missing_kernel_does_not_leave_a_layer_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def append_kv(*arguments: object, **options: object) -> torch.Tensor:
        raise MissingKernelError("not compiled")

    monkeypatch.setattr(ops, "append_kv", append_kv)
    with pytest.raises(MissingKernelError, match="not compiled"):
        replace_attention(OddAttention("as Llama"))


def test_trying_a_layer_runs_no_hooks() -> None:
    model, calls = make("llama"), []
    attention = model.model.layers[0].self_attn
    for module in (attention, attention.q_proj, attention.o_proj):
        module.register_forward_hook(lambda *_: calls.append(1))
    assert replace_attention(model) == LAYERS
    assert not calls
    texts(model, steps=0)
    assert calls == [1, 1, 1]


@pytest.mark.parametrize("name", MODELS)
def test_ragged_rows_decode_as_by_the_models_own_code(name: str, device: torch.device) -> None:
    model = make(name).to(device)
    logits, storage = texts(model)
    assert replace_attention(model) == LAYERS
    ours, written = texts(model)
    torch.testing.assert_close(ours, logits, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(written, storage, rtol=1e-4, atol=1e-4, equal_nan=True)


def test_bf16_is_as_close_to_fp32_as_torchs_rope(device: torch.device) -> None:
    heads = {"num_attention_heads": 8, "head_dim": 128}
    model = make("llama", **heads).to(device, torch.bfloat16)
    theirs, _ = texts(model)
    # The same cosines and sines as in 16 bits, of which the model makes them in either case.
    exact, _ = texts(copy.deepcopy(model).float())
    assert replace_attention(model) == LAYERS
    ours, _ = texts(model)
    assert (ours - exact).norm() <= 1.5 * (theirs - exact).norm()
    assert (theirs - exact).norm() < 0.1 * exact.norm()


def test_a_layer_runs_torch_kernels_in_projections_only() -> None:
    model = make("llama")
    replace_attention(model)
    attention, called = model.model.layers[1].self_attn, []

    class Calls(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if not (func.is_view or func._schema.name.endswith(("unsafe_view", "empty"))):
                called.append(func._schema.name)
            return func(*args, **(kwargs or {}))

    rows = RaggedStaticCache(model, max_batch=3, max_length=17).rows(
        torch.tensor([4, 0, 9], dtype=torch.int32)
    )
    angles = (torch.randn(3, 1, 16), torch.randn(3, 1, 16))
    given: dict[str, Any] = {"past_key_values": rows, "position_embeddings": angles}
    given["attention_mask"] = torch.tensor([4, 0, 9], dtype=torch.int32).view(3, 1, 1, 1)
    x = torch.randn(3, 1, 64)
    attention(x, **given)  # which makes the table for all layers
    with Calls():
        attention(x, **given)
    assert called.count("ostinato::append_kv") == 1
    # A CPU makes its page table in each call.
    others = {name for name in called if not name.startswith("ostinato::")} - {"aten::arange"}
    assert others == {"aten::mm"}
    assert called.count("aten::mm") == 4


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copy_has_layers_of_its_own(how: str) -> None:
    model = make("llama")
    assert replace_attention(model) == LAYERS
    other = copy.deepcopy(model) if how == "deepcopy" else pickle.loads(pickle.dumps(model))
    assert replace_attention(other) == []
    before, _ = texts(model)
    for layer in other.model.layers:
        layer.self_attn.q_proj.weight.zero_()
    assert not torch.equal(texts(other)[0], before)
    assert torch.equal(texts(model)[0], before)


def test_all_else_is_computed_by_the_class() -> None:
    ids = torch.randint(97, (2, 13))

    def outcomes(model: Any) -> list[torch.Tensor]:
        """Return logits without our cache, in training, by torch's attention, and gradients."""
        found = [model(ids).logits, model(ids, past_key_values=DynamicCache()).logits]
        model.train()
        found.append(texts(model)[0])
        model.eval().set_attn_implementation("sdpa")
        found.append(model(ids, past_key_values=DynamicCache()).logits)
        model.requires_grad_(True)
        model(ids).logits.square().sum().backward()
        return [*found, model.model.layers[0].self_attn.k_proj.weight.grad]

    model = make("llama")
    other = copy.deepcopy(model)
    assert replace_attention(other) == LAYERS
    for ours, theirs in zip(outcomes(other), outcomes(model), strict=True):
        assert torch.equal(ours, theirs)


def test_gradients_are_refused_as_by_the_class() -> None:
    model = make("llama").requires_grad_(True)
    replace_attention(model)
    with pytest.raises(ValueError, match="a tensor that requires a gradient, expected none"):
        texts(model)
    with torch.no_grad():
        texts(model)


def test_calls_that_are_refused() -> None:
    model = make("llama")
    replace_attention(model)
    cache = RaggedStaticCache(model, max_batch=3, max_length=8)
    rows, ids = cache.rows(torch.tensor([3, 4], dtype=torch.int32)), torch.ones(2, 3).long()
    with pytest.raises(ValueError, match="past_key_values: got 2 rows of 3 tokens, expected those"):
        model(ids, past_key_values=rows, position_ids=torch.zeros(2, 3).long())
    x, angles = torch.randn(3, 1, 64), torch.randn(3, 1, 16)
    with pytest.raises(ValueError, match="past_key_values: got 3 rows of 1 tokens, expected those"):
        model.model.layers[0].self_attn(x, (angles, angles), None, rows)
    model.half()
    with pytest.raises(TypeError, match=r"k_cache: got dtype torch.float32, expected"):
        model(ids[:, :1], past_key_values=rows, position_ids=rows.position_ids)
    assert not cache.storage.any()


def test_positions_that_all_rows_share() -> None:
    model = make("llama")
    lengths = torch.tensor([5, 5, 5], dtype=torch.int32)
    ids, logits = torch.randint(97, (3, 2)), []
    for _ in range(2):
        rows = RaggedStaticCache(model, max_batch=3, max_length=8).rows(lengths, tokens=2)
        positions = rows.position_ids[:1]
        logits.append(model(ids, past_key_values=rows, position_ids=positions).logits)
        replace_attention(model)
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-4, atol=1e-4)


def test_torch_compiles_it_in_one_graph() -> None:
    model = make("llama")
    replace_attention(model)
    cache = RaggedStaticCache(model, max_batch=3, max_length=8)

    def step(ids: torch.Tensor, seq_lens: torch.Tensor) -> torch.Tensor:
        rows = cache.rows(seq_lens)
        given: dict[str, Any] = {"past_key_values": rows, "position_ids": rows.position_ids}
        logits: torch.Tensor = model(ids, **given).logits
        return logits

    whole = torch.compile(step, backend="eager", fullgraph=True, dynamic=False)
    ids, seq_lens = torch.randint(97, (3, 1)), torch.tensor([3, 0, 8], dtype=torch.int32)
    torch.testing.assert_close(whole(ids, seq_lens), step(ids, seq_lens), rtol=1e-5, atol=1e-5)


def test_a_table_is_of_the_cosines_and_sines_of_its_call() -> None:
    model = make("llama")
    cache = RaggedStaticCache(model, max_batch=1, max_length=8)
    rows = cache.rows(torch.tensor([3], dtype=torch.int32))
    q, k = torch.randn(1, 1, 4, 16), torch.randn(1, 1, 2, 16)
    turns = [torch.full((1, 1, 16), turn) for turn in (0.0, 1.0)]
    straight, _, _ = rows.rotate_and_append(q, k, k, turns[1], turns[0], 0)
    again, keys, _ = rows.rotate_and_append(q, k, k, turns[1], turns[0], 1)
    assert torch.equal(straight, q)
    assert torch.equal(again, q)
    assert torch.equal(keys[0, :, 2], k[0, 0])
    quarter, _, _ = rows.rotate_and_append(q, k, k, turns[0], turns[1], 0)
    assert torch.equal(quarter, torch.cat([-q[..., 8:], q[..., :8]], dim=-1))


def test_graphs_replay_what_replaced_layers_compute(device: torch.device) -> None:
    heads = {"num_attention_heads": 8, "head_dim": 128}
    model = make("llama", **heads).to(device, torch.bfloat16)
    assert replace_attention(model) == LAYERS
    cache = RaggedStaticCache(model, max_batch=8, max_length=40)
    cache.storage.normal_()

    def step(batch: Any) -> torch.Tensor:
        rows = cache.rows(batch.seq_lens)
        given: dict[str, Any] = {"past_key_values": rows, "position_ids": rows.position_ids}
        logits: torch.Tensor = model(batch.tokens[:, None], **given).logits[:, -1]
        return logits

    def some(generator: torch.Generator, size: tuple[int, ...]) -> torch.Tensor:
        return torch.randint(1, 40, size, generator=generator, dtype=torch.int32)

    specs = {
        "tokens": BufferSpec((), torch.int32, 0, some),
        "seq_lens": BufferSpec((), torch.int32, 0, some),
    }
    buffers = StaticBuffers(specs, 8, device)
    memory = {"model": model, "cache": cache.tensors()}
    with GraphRunner(step, buffers, memory=memory) as runner:
        report = runner.capture([1, 3, 8])
        assert {graph.verdict for graph in report.graphs} == {"bit-equal"}
        inputs = {"tokens": torch.tensor([7, 3, 5], dtype=torch.int32)}
        for lengths in ([40, 17, 1], [12, 0, 33]):
            inputs["seq_lens"] = torch.tensor(lengths, dtype=torch.int32)
            replayed = runner.run(3, inputs)
            with torch.no_grad():
                rows = cache.rows(inputs["seq_lens"].to(device))
                given: dict[str, Any] = {"past_key_values": rows, "position_ids": rows.position_ids}
                eager = model(inputs["tokens"][:, None].to(device), **given).logits[:, -1]
            assert torch.equal(replayed, eager)


def test_a_layer_that_does_not_say_what_it_sees_is_refused() -> None:
    """Encoders that transformers computes eagerly have no `is_causal`, and no mask."""
    q = torch.randn(1, 2, 3, 16)
    with pytest.raises(ValueError, match="is_causal: got None from Identity, expected a bool"):
        attention(torch.nn.Identity(), q, q, q, None)
    out, _ = attention(torch.nn.Identity(), q[:, :, :1], q, q, None)  # the last sees all, anyhow
    assert out.shape == (1, 1, 2, 16)


@pytest.mark.parametrize("name", ["indices", "block_indices", "sinks"])
def test_attention_to_chosen_keys_is_refused(name: str) -> None:
    q = torch.randn(1, 2, 3, 16)
    with pytest.raises(ValueError, match=f"{name}: got a tensor, expected None"):
        attention(torch.nn.Identity(), q, q, q, None, is_causal=True, **{name: torch.zeros(1)})
