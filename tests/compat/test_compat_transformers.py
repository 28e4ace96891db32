"""Our attention in models of transformers: what they compute with it, and what it refuses."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import compat_sizes
import pytest
import torch
import transformers
from transformers import (
    BertConfig,
    BertModel,
    Gemma2Config,
    Gemma2ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    StaticCache,
)
from transformers.modeling_outputs import CausalLMOutputWithPast

from ostinato.compat.transformers import NAME, RaggedStaticCache, attention
from ostinato.graphs import BufferSpec, GraphRunner, StaticBuffers, Variant
from ostinato.ops import reference

transformers.logging.set_verbosity_error()

PAGE = Path(__file__).parents[2] / "docs" / "graphs" / "transformers.md"
SIZES: dict[str, Any] = {**compat_sizes.SIZES, "num_hidden_layers": 3}
# With all that changes what attention does: windows in all layers or some, softcap, sinks.
MODELS: dict[str, Any] = {
    "llama": (LlamaConfig(**SIZES), LlamaForCausalLM),
    "mistral": (MistralConfig(**SIZES, sliding_window=7), MistralForCausalLM),
    "gemma2": (
        Gemma2Config(**SIZES, sliding_window=7, head_dim=16, query_pre_attn_scalar=24),
        Gemma2ForCausalLM,
    ),
    "gpt-oss": (
        GptOssConfig(
            **SIZES, sliding_window=7, head_dim=16, num_local_experts=2, num_experts_per_tok=1
        ),
        GptOssForCausalLM,
    ),
}
GREEDY: dict[str, Any] = {
    "max_new_tokens": 12,
    "do_sample": False,
    "eos_token_id": None,
    "pad_token_id": 0,
    "disable_compile": True,
}
LENGTHS = [9, 0, 4, 1]


def make(name: str) -> Any:
    """Return a model whose attention matters to its outputs."""
    config, kind = MODELS[name]
    model = kind(copy.deepcopy(config)).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter), alpha=0.05)
    return model


def prompts(lengths: list[int]) -> torch.Tensor:
    """Return tokens [rows, longest], padded with 0 on the left."""
    ids = torch.randint(1, SIZES["vocab_size"], (len(lengths), max(lengths)))
    for row, length in zip(ids, lengths, strict=True):
        row[: len(row) - length] = 0
    return ids


def both(model: Any, *args: Any, theirs: str = "eager", **kwargs: Any) -> tuple[Any, Any]:
    """Return what a model gives with our attention, and what with theirs."""
    model.set_attn_implementation(NAME)
    ours = model(*args, **kwargs)
    model.set_attn_implementation(theirs)
    return ours, model(*args, **kwargs)


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_eager_attention(name: str) -> None:
    ours, theirs = both(make(name), prompts([13, 13]))
    torch.testing.assert_close(ours.logits, theirs.logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("lengths", [[13, 13], [13, 4, 1]], ids=["even", "padded"])
@pytest.mark.parametrize("name", MODELS)
def test_texts_are_those_of_eager_attention(
    name: str, lengths: list[int], cache: str | None
) -> None:
    model, ids = make(name), prompts(lengths)
    options = {**GREEDY, "attention_mask": (ids != 0).long(), "cache_implementation": cache}
    model.set_attn_implementation(NAME)
    ours = model.generate(ids, **options)
    model.set_attn_implementation("eager")
    assert torch.equal(ours, model.generate(ids, **options))


def test_models_that_see_both_ways() -> None:
    sizes = {name: size for name, size in SIZES.items() if name != "num_key_value_heads"}
    model: Any = BertModel(BertConfig(**sizes)).eval().requires_grad_(False)
    ours, theirs = both(model, prompts([13, 13]), attention_mask=torch.ones(2, 13))
    torch.testing.assert_close(ours[0], theirs[0], rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="attention_mask: got padding where each query sees"):
        both(model, prompts([13, 4]), attention_mask=torch.eye(2, 13))


def test_lengths_of_the_caller_precede_those_of_the_cache() -> None:
    model = make("llama")
    model.set_attn_implementation(NAME)
    ids = prompts([9, 9, 9])
    logits = []
    for seq_lens in (None, torch.tensor([9, 0, 9], dtype=torch.int32)):
        cache = StaticCache(config=model.config, max_cache_len=16)
        logits.append(model(ids, past_key_values=cache, seq_lens=seq_lens).logits)
    assert torch.equal(logits[0][[0, 2]], logits[1][[0, 2]])
    assert not torch.equal(logits[0][1], logits[1][1])


@pytest.mark.parametrize("seq_lens", [[16, 9, 0, 3], None], ids=["ragged", "whole"])
@pytest.mark.parametrize("tokens", [1, 3])
def test_a_call_attends_to_the_places_that_are_taken(
    tokens: int, seq_lens: list[int] | None, device: torch.device
) -> None:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    q = torch.randn(4, 8, tokens, 64, device=device, dtype=dtype)
    k, v = (torch.randn(4, 2, 16, 64, device=device, dtype=dtype) for _ in "kv")
    lengths = [16] * 4 if seq_lens is None else seq_lens
    for b, length in enumerate(lengths):
        k[b, :, length:], v[b, :, length:] = float("nan"), float("nan")
    given = None if seq_lens is None else torch.tensor(lengths, dtype=torch.int32, device=device)
    whole = seq_lens is None
    out, weights = attention(
        torch.nn.Module(), q, k, v, None, is_causal=not whole, seq_lens=given, scaling=0.2
    )
    assert weights is None
    assert out.shape == (4, tokens, 8, 64)
    for b, length in enumerate(lengths):
        keys, values = (x[b, :, :length].transpose(0, 1) for x in (k, v))
        expected, _ = reference.attention(
            q[b].transpose(0, 1), keys, values, scale=0.2, causal=not whole, dtype=torch.float64
        )
        tolerance = 2e-2 if dtype is torch.bfloat16 else 1e-4
        torch.testing.assert_close(out[b].double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", MODELS)
def test_rows_of_different_lengths_decode_as_each_alone(name: str) -> None:
    model, ids = make(name), prompts(LENGTHS)
    seq_lens = torch.tensor(LENGTHS, dtype=torch.int32)
    real = seq_lens > 0
    model.set_attn_implementation(NAME)
    cache = RaggedStaticCache(model, max_batch=5, max_length=17)
    assert cache.places == 32
    cache.storage.fill_(float("nan"))
    rows = cache.rows(seq_lens, tokens=ids.size(1))
    tokens = []
    for _ in range(GREEDY["max_new_tokens"]):
        logits = model(ids, past_key_values=rows, position_ids=rows.position_ids).logits[:, -1]
        assert not logits[real].isnan().any()
        tokens.append(logits.argmax(-1))
        ids, seq_lens = tokens[-1][:, None], seq_lens + real.int()
        rows = cache.rows(seq_lens)
    torch.manual_seed(0)  # as it was before the model
    model, ids = make(name), prompts(LENGTHS)
    for b in real.nonzero().flatten().tolist():
        alone = model.generate(ids[b : b + 1, -LENGTHS[b] :], **GREEDY)[0, LENGTHS[b] :]
        assert torch.equal(torch.stack(tokens)[:, b], alone)
    assert cache.storage[:, :, [1, 4]].isnan().all()


def test_what_has_no_place_is_not_written() -> None:
    model = make("llama")
    model.set_attn_implementation(NAME)
    cache = RaggedStaticCache(model, max_batch=2, max_length=16)
    rows = cache.rows(torch.tensor([17, 0], dtype=torch.int32))
    assert rows.position_ids.tolist() == [[15], [0]]
    model(torch.tensor([[3], [4]]), past_key_values=rows, position_ids=rows.position_ids)
    assert not cache.storage.any()


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"output_attentions": True}, "output_attentions: got True, expected None"),
        (
            {"attention_mask": torch.ones(2, 1, 13, 13, dtype=torch.bool)},
            r"attention_mask: got torch.bool of shape \[2, 1, 13, 13\], expected",
        ),
        (
            {"attention_mask": torch.arange(13).repeat(2, 1) < 5},
            "attention_mask: got padding after tokens",
        ),
        ({"attention_mask": torch.ones(2, 5)}, r"attention_mask: got shape \[2, 5\], expected"),
        (
            {"position_ids": torch.arange(13).repeat(2, 1) % 5, "use_cache": False},
            "mask_function: got .* not packed",
        ),
        ({"seq_lens": torch.tensor([5, 4])}, "seq_lens: got dtype torch.int64, expected"),
        (
            {
                "seq_lens": torch.tensor([13, 13], dtype=torch.int32),
                "attention_mask": torch.arange(13).repeat(2, 1) > 5,
            },
            "seq_lens: got a tensor with an attention_mask that has padding",
        ),
        ({"position_bias": torch.ones(2)}, "position_bias: got a tensor, expected None"),
    ],
)
def test_what_is_refused(given: dict[str, Any], match: str) -> None:
    model = make("llama")
    model.set_attn_implementation(NAME)
    with pytest.raises((TypeError, ValueError), match=match):
        model(prompts([13, 13]), **given)


def test_chunked_attention_gradients_and_dropout_are_refused() -> None:
    config = Llama4TextConfig(
        **SIZES, head_dim=16, intermediate_size_mlp=64, num_local_experts=2, attention_chunk_size=5
    )
    model: Any = Llama4ForCausalLM(config).eval()
    model.set_attn_implementation(NAME)
    with pytest.raises(ValueError, match=r"mask_function: got .* chunked"):
        model(prompts([13, 13]))
    model = make("llama").requires_grad_(True)
    model.set_attn_implementation(NAME)
    with pytest.raises(ValueError, match="a tensor that requires a gradient"):
        model(prompts([13]))
    model.config.attention_dropout = 0.5
    model.train()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    with torch.no_grad(), pytest.raises(ValueError, match=r"dropout: got 0.5, expected 0"):
        model(prompts([13]))


def test_what_attention_itself_refuses() -> None:
    q, k = torch.randn(2, 4, 3, 16), torch.randn(2, 2, 8, 16)
    module = torch.nn.Module()
    lengths = torch.full((2, 1, 1, 1), 8, dtype=torch.int32)
    with pytest.raises(ValueError, match="attention_mask: got None for 3 queries and 8 keys"):
        attention(module, q, k, k, None)
    with pytest.raises(ValueError, match=r"key: got shape \[1, 2, 8, 16\], expected \[2, heads"):
        attention(module, q, k[:1], k[:1], None)
    with pytest.raises(ValueError, match="sliding_window: got 4, expected that of the mask, None"):
        attention(module, q, k, k, lengths, sliding_window=4)
    with pytest.raises(ValueError, match="sliding_window: got None, expected that of the mask, 4"):
        attention(module, q, k, k, lengths.expand(-1, -1, -1, 4))
    with pytest.raises(ValueError, match="sliding_window: got 4 where each query sees every key"):
        attention(module, q, k, k, None, is_causal=False, sliding_window=4)
    with pytest.raises(ValueError, match="seq_lens: got a tensor for a layer with a sliding"):
        attention(module, q, k, k, None, seq_lens=lengths[:, 0, 0, 0], sliding_window=4)
    with pytest.raises(TypeError, match="attention_mask: got str, expected"):
        attention(module, q, k, k, "causal")  # type: ignore[arg-type]


def test_what_a_ragged_cache_refuses() -> None:
    model = make("llama")
    with pytest.raises(ValueError, match="model: got attn_implementation 'sdpa', expected"):
        RaggedStaticCache(model, max_batch=2, max_length=8)
    model.set_attn_implementation(NAME)
    with pytest.raises(ValueError, match="max_length: got 0"):
        RaggedStaticCache(model, max_batch=2, max_length=0)
    model._is_stateful = True  # as models with a recurrent state say
    with pytest.raises(ValueError, match="model: got LlamaForCausalLM, expected one that keeps"):
        RaggedStaticCache(model, max_batch=2, max_length=8)
    model._is_stateful = False
    cache = RaggedStaticCache(model, max_batch=2, max_length=8)
    lengths = torch.tensor([3, 4], dtype=torch.int32)
    with pytest.raises(ValueError, match="seq_lens: got 4 rows, expected at most 2"):
        cache.rows(lengths.repeat(2))
    with pytest.raises(TypeError, match=r"seq_lens: got dtype torch.int64"):
        cache.rows(lengths.long())
    rows, ids = cache.rows(lengths), torch.ones(2, 1, dtype=torch.int64)
    with pytest.raises(ValueError, match="position_ids: got None, expected those of rows"):
        model(ids, past_key_values=rows)
    with pytest.raises(ValueError, match="past_key_values: got 2 rows of 3 tokens, expected"):
        model(ids.repeat(1, 3), past_key_values=rows, position_ids=torch.zeros(2, 3).long())
    mask = torch.ones(2, 4)
    with pytest.raises(ValueError, match="attention_mask: got a tensor with rows of a Ragged"):
        model(ids, attention_mask=mask, past_key_values=rows, position_ids=rows.position_ids)
    model.set_attn_implementation("sdpa")
    with pytest.raises(ValueError, match="model: got attn_implementation 'sdpa', expected"):
        cache.rows(lengths)


def test_the_example_of_the_docs_runs(capsys: pytest.CaptureFixture[str]) -> None:
    example = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)[0]
    model, ids = make("llama"), prompts([9, 4, 1])
    names: dict[str, Any] = {"model": model, "ids": ids}
    names["seq_lens"] = torch.tensor([9, 4, 1], dtype=torch.int32)
    exec(example, names)
    assert capsys.readouterr().out.count("bit-equal") == 4
    model.set_attn_implementation("eager")
    expected = model.generate(ids, attention_mask=(ids != 0).long(), **GREEDY)[:, 9:]
    assert torch.equal(torch.stack(names["tokens"], dim=1), expected[:, :11])


def test_torch_compiles_it_in_one_graph() -> None:
    model = make("llama")
    model.set_attn_implementation(NAME)
    compiled = torch.compile(model, backend="eager", fullgraph=True, dynamic=False)
    logits = []
    for call in (model, compiled):
        cache = StaticCache(config=model.config, max_cache_len=16)
        first = model(torch.full((2, 9), 5), past_key_values=cache).logits[:, -1]
        positions = torch.full((2, 1), 9)
        tokens = first.argmax(-1, keepdim=True)
        logits.append(call(tokens, past_key_values=cache, position_ids=positions).logits)
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-5, atol=1e-5)


def random_decoder(device: torch.device) -> Any:
    """Return a small Llama of heads that our kernels serve, with four query heads to each of KV."""
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128}
    model: Any = LlamaForCausalLM(LlamaConfig(**{**SIZES, **heads})).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter), alpha=0.05)
    return model.to(device, torch.bfloat16)


@pytest.mark.parametrize("lengths", [[200, 200], [200, 77, 1]], ids=["even", "padded"])
def test_bf16_is_as_close_to_fp32_as_torchs_attention(
    lengths: list[int], device: torch.device
) -> None:
    model, ids = random_decoder(device), prompts(lengths).to(device)
    mask = (ids != 0).long()
    longer = torch.nn.functional.pad(mask, (0, 1), value=1)
    positions = (longer.cumsum(-1) - 1).clamp_min(0)

    def last_logits(model: Any, implementation: str) -> torch.Tensor:
        """Return those of a prompt, and of a token after it."""
        model.set_attn_implementation(implementation)
        given = {"past_key_values": StaticCache(config=model.config, max_cache_len=208)}
        prompt = model(ids, attention_mask=mask, position_ids=positions[:, :-1], **given)
        after = model(ids[:, -1:], attention_mask=longer, position_ids=positions[:, -1:], **given)
        return torch.stack([each.logits[:, -1].float() for each in (prompt, after)])

    ours, theirs = (last_logits(model, implementation) for implementation in (NAME, "sdpa"))
    exact = last_logits(model.float(), "eager")
    assert (ours - exact).norm() <= 1.5 * (theirs - exact).norm()
    assert (theirs - exact).norm() < 0.1 * exact.norm()


def test_graphs_of_a_ragged_cache_replay_what_the_step_computes(device: torch.device) -> None:
    model = random_decoder(device)
    model.set_attn_implementation(NAME)
    cache = RaggedStaticCache(model, max_batch=16, max_length=300)
    cache.storage.normal_()

    def step(batch: Any) -> dict[str, torch.Tensor]:
        rows = cache.rows(batch.seq_lens)
        given: dict[str, Any] = {"past_key_values": rows, "position_ids": rows.position_ids}
        return {"logits": model(batch.tokens[:, None], **given).logits[:, -1]}

    def some(generator: torch.Generator, size: tuple[int, ...]) -> torch.Tensor:
        return torch.randint(1, 300, size, generator=generator, dtype=torch.int32)

    def token(generator: torch.Generator, size: tuple[int, ...]) -> torch.Tensor:
        return torch.randint(97, size, generator=generator)

    specs = {
        "tokens": BufferSpec((), torch.int64, 0, token),
        "seq_lens": BufferSpec((), torch.int32, 0, some),
    }
    buffers = StaticBuffers(specs, 16, device)
    memory = {"model": model, "cache": cache.tensors()}
    with GraphRunner(step, buffers, memory=memory) as runner:
        report = runner.capture({Variant(): [1, 3, 8], Variant(name="bucket"): [16]})
        assert {graph.verdict for graph in report.graphs} == {"bit-equal"}
        tokens = torch.randint(97, (3,))
        seq_lens = torch.tensor([300, 17, 1], dtype=torch.int32)
        inputs = {"tokens": tokens, "seq_lens": seq_lens}
        exact = runner.run(3, inputs)["logits"].clone()
        with torch.no_grad():
            rows = cache.rows(seq_lens.to(device))
            given: dict[str, Any] = {"past_key_values": rows, "position_ids": rows.position_ids}
            eager = model(tokens[:, None].to(device), **given).logits[:, -1]
        assert torch.equal(exact, eager)
        untouched = cache.storage[:, :, 3:].clone()
        padded = runner.run(3, inputs, variant=Variant(name="bucket"))["logits"]
        assert (padded - exact).float().norm() < 2e-2 * exact.float().norm()
        assert torch.equal(cache.storage[:, :, 3:], untouched)


@pytest.mark.parametrize("runs_before", [0, 3])  # of which the last are repeated without Python
def test_a_step_that_returns_a_model_output_gets_one_back(
    runs_before: int, device: torch.device
) -> None:
    model = make("llama").to(device)
    # Others of transformers' attentions take another kernel where they are captured.
    model.set_attn_implementation("eager")
    specs = {"ids": BufferSpec((5,), torch.int64, 0)}

    def step(batch: Any) -> Any:
        return model(batch.ids, use_cache=False, output_hidden_states=False)

    ids = torch.randint(97, (2, 5))
    with GraphRunner(step, StaticBuffers(specs, 4, device), memory={"model": model}) as runner:
        runner.capture([4])
        for _ in range(runs_before):
            runner.run(2, {"ids": ids})
        changed = runner.run(2, {"ids": ids})
        changed.logits = None
        output = runner.run(2, {"ids": ids})
        assert type(output) is CausalLMOutputWithPast
        expected = model(ids.to(device), use_cache=False).logits
        torch.testing.assert_close(output.logits, expected, rtol=1e-4, atol=1e-4)
        assert output["logits"] is output[0] is output.logits
        assert output.loss is None
