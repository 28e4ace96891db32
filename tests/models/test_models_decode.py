"""The decode step of a quantised model on a GPU, against the same step on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from ostinato.bench.shapes import SHAPES
from ostinato.bench.weights import random_decoder
from ostinato.engine.decode_step import DecodeStep, SeenTokens
from ostinato.graphs import GraphRunner, StaticBuffers
from ostinato.models import ModelConfig, PagedKVCache, read_config
from ostinato.models.families.llama import Llama

CONTEXT, MAX_BATCH, PAGE = 96, 16, 16
BUCKETS = (1, 2, 4, 8, 16)
CPU = torch.device("cpu")
SMALL = {
    **SHAPES["tiny"],
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
}


FACTORS = {
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.1,
    "residual_multiplier": 0.22,
    "logits_scaling": 3.0,
}
MIXED = {"sliding_window": 32, "layer_types": ["sliding_attention", "full_attention"]}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 8.0,
    "original_max_position_embeddings": 32,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 64,
    "long_factor": [1.0 + 0.05 * pair for pair in range(64)],
    "original_max_position_embeddings": 32,
}
# One of each part that needs other launches than Llama's, or other arguments of them.
FAMILIES: dict[str, dict[str, Any]] = {
    "smollm3": {"no_rope_layers": [1, 0]},
    "granite": FACTORS,
    "granite_swa": {**FACTORS, **MIXED, "layer_rope_theta": [1e4, 0]},
    "glm4": {},
    "helium": {},
    "llama": {"rope_scaling": LONGROPE},
    "ministral3": {"rope_parameters": {**YARN, "llama_4_scaling_beta": 0.3}},
    "olmo2": {},
    "exaone4": MIXED,
    "gemma": {"head_dim": 256, "num_key_value_heads": 1},
    "gemma2": {**MIXED, "query_pre_attn_scalar": 96, "final_logit_softcapping": 3.0},
    "gemma3_text": {**MIXED, "head_dim": 256, "num_key_value_heads": 1},
    "hunyuan_v1_dense": {"rope_scaling": {"type": "dynamic", "alpha": 50.0, "factor": 1.0}},
    "phi3": {
        "partial_rotary_factor": 0.75,
        "rope_scaling": {
            **LONGROPE,
            "short_factor": [1.0] * 48,
            "long_factor": [1.0 + 0.05 * pair for pair in range(48)],
        },
        "original_max_position_embeddings": 32,
    },
    "nemotron": {"hidden_act": "relu2"},
    "starcoder2": {"hidden_act": "gelu_pytorch_tanh", "sliding_window": 32},
    "stablelm": {"qk_layernorm": True},
    "cohere": {"use_qk_norm": True, "logit_scale": 0.3},
    "cohere2": MIXED,
    "phi": {"hidden_act": "gelu_new"},
}
# All experts are chosen: near ties between them would make two right results differ.
_EXPERTS = {"num_experts_per_tok": 4, "moe_intermediate_size": 96}
WITH_EXPERTS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {**_EXPERTS, "num_experts": 4, "norm_topk_prob": True},
    "qwen2_moe": {**_EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 112},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 4},
    "glm4_moe": {**_EXPERTS, "n_routed_experts": 4, "first_k_dense_replace": 1},
    "minimax_m2": {"num_local_experts": 4, "num_experts_per_tok": 4},
}


def shape_of(family: str) -> dict[str, Any]:
    """Return the configuration of a small model with untied embeddings and heads of 128."""
    return {
        **SMALL,
        "model_type": family,
        "eos_token_id": 2,
        "bos_token_id": 1,
        "tie_word_embeddings": False,
        **{**FAMILIES, **WITH_EXPERTS}[family],
    }


def converted(part: Any, device: torch.device, dense: torch.dtype) -> Any:
    """Return a copy of a tensor, or of a layer, on a device, with 16-bit numbers as `dense`."""
    if isinstance(part, torch.Tensor):
        return part.to(device, dense if part.dtype is torch.bfloat16 else part.dtype)
    if not hasattr(part, "__dataclass_fields__"):
        return part
    values = {f.name: converted(getattr(part, f.name), device, dense) for f in fields(part)}
    if values.get("out_dtype") is torch.bfloat16:
        values["out_dtype"] = dense
    return type(part)(**values)


def copy_of(model: Llama, device: torch.device, dense: torch.dtype) -> Llama:
    return type(model)(
        replace(model.config, dtype=dense),
        converted(model.embedding, device, dense),
        [converted(layer, device, dense) for layer in model.layers],
        converted(model.norm, device, dense),
        converted(model.lm_head, device, dense),
        max_context=model.max_context,
        batch_invariant=model.batch_invariant,
    )


def cache_shape(config: ModelConfig, batch: int = MAX_BATCH) -> torch.Size:
    pages = 1 + batch * (CONTEXT // PAGE)
    cache = PagedKVCache.for_model(config, num_pages=pages, page_size=PAGE, device=CPU)
    return cache.storage.shape


def runner_of(
    model: Llama,
    keys_and_values: torch.Tensor,
    buckets: Sequence[int] = BUCKETS,
    *,
    logits: bool = True,
) -> GraphRunner[dict[str, torch.Tensor]]:
    pages, most = CONTEXT // PAGE, max(buckets)
    cache = PagedKVCache.for_model(
        model.config, num_pages=1 + most * pages, page_size=PAGE, device=model.device
    )
    cache.storage.copy_(keys_and_values)
    seen = SeenTokens(most, model.config.vocab_size, model.device)
    step = DecodeStep(model, cache, seen, max_pages=pages, logits=logits)
    runner = GraphRunner(step, StaticBuffers(step.buffer_specs(), most, model.device))
    runner.capture(buckets, progress=False, verify=False)
    return runner


def inputs_of(n: int) -> dict[str, torch.Tensor]:
    """Return sequences of different lengths, each in pages of its own, decoded greedily."""
    pages = 1 + torch.arange(n * (CONTEXT // PAGE)).view(n, -1)
    lengths = torch.arange(n) * 5 % (CONTEXT - 2) + 2
    last = lengths - 1
    return {
        "tokens": torch.randint(SMALL["vocab_size"], (n,)),
        "positions": last.int(),
        "seq_lens": lengths.int(),
        "slot_mapping": pages[torch.arange(n), last // PAGE] * PAGE + last % PAGE,
        "page_table": pages.int(),
        "slots": torch.arange(n),
        "temperature": torch.zeros(n),
        "top_k": torch.zeros(n, dtype=torch.int32),
        "top_p": torch.ones(n),
        "min_p": torch.zeros(n),
        "repetition_penalty": torch.ones(n),
        "seeds": torch.arange(n),
        "counters": last,
    }


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("family", "precision", "batch_invariant"),
    [
        *(("tiny", precision, fixed) for precision in ("int8", "fp8") for fixed in (True, False)),
        *((family, "int8", True) for family in FAMILIES),
        *((family, "bf16", True) for family in FAMILIES),
        *(
            (family, precision, True)
            for family in WITH_EXPERTS
            for precision in ("bf16", "int8", "fp8", "fp8-block")
        ),
    ],
)
def test_greedy_tokens_are_the_references_in_every_bucket(
    family: str, precision: str, batch_invariant: bool
) -> None:
    """The error in fp32's eyes is at most twice that of torch's operators with the same dtypes."""
    config = read_config(SMALL if family == "tiny" else shape_of(family))
    plain = random_decoder(
        config,
        precision,
        CPU,
        max_context=CONTEXT,
        lm_head="fp8" if precision == "fp8-block" else precision,
        batch_invariant=batch_invariant,
    )
    stored = torch.randn(cache_shape(config)).bfloat16()
    models = [
        copy_of(plain, device, dense)
        for device, dense in (
            (torch.device("cuda"), torch.bfloat16),
            (CPU, torch.bfloat16),
            (CPU, torch.float32),
        )
    ]
    outputs = []
    for model in models:
        torch.manual_seed(1)
        with runner_of(model, stored) as runner:
            outputs.append(
                [
                    {name: output.cpu().clone() for name, output in runner.run(n, inputs).items()}
                    for n, inputs in ((n, inputs_of(n)) for n in range(1, MAX_BATCH + 1))
                ]
            )
    got, torchs, exact = outputs
    logits = [output["logits"] for output in exact]

    def error(outputs: list[dict[str, torch.Tensor]]) -> float:
        pairs = zip(outputs, logits, strict=True)
        return max(float((output["logits"] - want).abs().max()) for output, want in pairs)

    assert error(got) <= 2 * error(torchs)
    for output, reference, want in zip(got, exact, logits, strict=True):
        assert torch.equal(output["tokens"], output["logits"].argmax(1))
        # A token that leads by more than both can be wrong is the same.
        best, second = want.topk(2).values.unbind(1)
        clear = best - second > 2 * error(got)
        assert torch.equal(output["tokens"][clear], reference["tokens"][clear])


@pytest.mark.gpu
@pytest.mark.parametrize("n", [1, 2, 5])
def test_ten_thousand_replays_change_no_logit(n: int) -> None:
    model = random_decoder(read_config(SMALL), "int8", torch.device("cuda"), max_context=CONTEXT)
    stored = torch.randn(cache_shape(model.config)).bfloat16()
    with runner_of(model, stored) as runner:
        inputs = {name: value.cuda() for name, value in inputs_of(n).items()}
        expected = runner.run(n, inputs)["logits"].clone()
        changed = torch.zeros((), dtype=torch.int64, device="cuda")
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        for _ in range(10_000):
            changed += (runner.run(n, inputs)["logits"] != expected).sum()
        assert int(changed) == 0
        assert torch.cuda.memory_allocated() == before


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["int8", "fp8"])
def test_tokens_do_not_depend_on_who_reads_the_logits(precision: str) -> None:
    """Greedy and random rows, with a penalty and without; up to 16 rows none is left out."""
    buckets = (16, 48)
    config = read_config({**SMALL, "vocab_size": 32000})
    device = torch.device("cuda")
    model = random_decoder(config, precision, device, max_context=CONTEXT, lm_head=precision)
    stored = torch.randn(cache_shape(config, max(buckets))).bfloat16()
    rows = torch.arange(max(buckets))
    outputs = []
    for logits in (True, False):
        torch.manual_seed(2)
        with runner_of(model, stored, buckets, logits=logits) as runner:
            for n in (3, 16, 17, 48):
                inputs = inputs_of(n)
                inputs["temperature"] = torch.tensor([0.0, 0.0, 1.2])[rows[:n] % 3]
                inputs["repetition_penalty"] = torch.tensor([1.0, 1.0, 1.0, 1.4])[rows[:n] % 4]
                got = runner.run(n, inputs)
                assert ("argmax" in got) == (not logits and n > 16)
                outputs.append(got["tokens"].tolist())
    assert outputs[:4] == outputs[4:]


@pytest.mark.gpu
@pytest.mark.parametrize("logits", [True, False])
@pytest.mark.parametrize("precision", ["int8", "fp8"])
@pytest.mark.parametrize("family", ["tiny", *FAMILIES, *WITH_EXPERTS])
def test_a_step_with_an_8_bit_projection_consists_of_our_kernels(
    family: str, precision: str, logits: bool
) -> None:
    config = read_config(SMALL if family == "tiny" else shape_of(family))
    device = torch.device("cuda")
    model = random_decoder(config, precision, device, max_context=CONTEXT, lm_head=precision)
    buckets = (1, 8, 48)
    stored = torch.randn(cache_shape(config, max(buckets))).bfloat16()
    with runner_of(model, stored, buckets, logits=logits) as runner:
        report = runner.recapture(progress=False, verify=False)
    assert report.not_inspected is None
    for graph in report.graphs:
        assert graph.nodes is not None
        assert set(graph.nodes) == {"kernel"}
        assert [name for name in graph.kernels or {} if "ostinato" not in name] == []
        assert sum("embed" in name for name in graph.kernels or {}) == 1
        # Each may begin before the one in front of it has ended.
        assert graph.edges == graph.pdl_edges == graph.nodes["kernel"] - 1, str(report)
