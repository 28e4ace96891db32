"""The decode step of a quantised model on a GPU against the same step on the CPU's reference ops."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch

from ostinato.bench.shapes import SHAPES
from ostinato.bench.weights import random_llama
from ostinato.engine.decode import DecodeStep, SeenTokens
from ostinato.graphs import GraphRunner, StaticBuffers
from ostinato.model import DecoderLayer, Llama, ModelConfig, PagedKVCache, W8A8Linear
from ostinato.ops import PackedWeight

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


def on(device: torch.device, part: object) -> object:
    """Return a copy of a tensor, a layer or a part of one on a device."""
    if isinstance(part, torch.Tensor):
        return part.to(device)
    if not hasattr(part, "__dataclass_fields__") or isinstance(part, PackedWeight):
        return part
    values = {field.name: on(device, getattr(part, field.name)) for field in fields(part)}  # type: ignore[arg-type]
    return replace(part, **values)  # type: ignore[type-var]


def copy_of(model: Llama, device: torch.device) -> Llama:
    layers = [on(device, layer) for layer in model.layers]
    head = on(device, model.lm_head)
    assert all(isinstance(layer, DecoderLayer) for layer in layers)
    assert isinstance(head, W8A8Linear)
    return Llama(
        model.config,
        model.embedding.to(device),
        layers,  # type: ignore[arg-type]
        model.norm.to(device),
        head,
        max_context=model.max_context,
        batch_invariant=model.batch_invariant,
    )


def runner_of(model: Llama, keys_and_values: torch.Tensor) -> GraphRunner[dict[str, torch.Tensor]]:
    pages = CONTEXT // PAGE
    cache = PagedKVCache.for_model(
        model.config, num_pages=1 + MAX_BATCH * pages, page_size=PAGE, device=model.device
    )
    cache.storage.copy_(keys_and_values)
    seen = SeenTokens(MAX_BATCH, model.config.vocab_size, model.device)
    step = DecodeStep(model, cache, seen, max_pages=pages)
    runner = GraphRunner(step, StaticBuffers(step.buffer_specs(), MAX_BATCH, model.device))
    runner.capture(BUCKETS, progress=False, verify=False)
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
@pytest.mark.parametrize("batch_invariant", [True, False])
@pytest.mark.parametrize("precision", ["int8", "fp8"])
def test_greedy_tokens_are_the_references_in_every_bucket(
    precision: str, batch_invariant: bool
) -> None:
    config = ModelConfig.from_hf(SMALL)
    reference = random_llama(
        config,
        precision,
        CPU,
        max_context=CONTEXT,
        lm_head=precision,
        batch_invariant=batch_invariant,
    )
    model = copy_of(reference, torch.device("cuda"))
    shape = PagedKVCache.for_model(
        config, num_pages=1 + MAX_BATCH * (CONTEXT // PAGE), page_size=PAGE, device=CPU
    ).storage.shape
    stored = torch.randn(shape).bfloat16()
    agreed = 0
    with runner_of(model, stored) as runner, runner_of(reference, stored) as expected:
        for n in range(1, MAX_BATCH + 1):
            inputs = inputs_of(n)
            got, want = runner.run(n, inputs), expected.run(n, inputs)
            logits = want["logits"]
            tolerance = 0.03 * float(logits.abs().max())
            torch.testing.assert_close(got["logits"].cpu(), logits, rtol=0.0, atol=tolerance)
            best, second = logits.topk(2).values.unbind(1)
            clear = best - second > 2 * tolerance
            assert torch.equal(got["tokens"].cpu()[clear], want["tokens"][clear])
            agreed += int(clear.sum())
    assert agreed >= 8


@pytest.mark.gpu
@pytest.mark.parametrize("n", [1, 2, 5])
def test_ten_thousand_replays_change_no_logit(n: int) -> None:
    model = random_llama(
        ModelConfig.from_hf(SMALL), "int8", torch.device("cuda"), max_context=CONTEXT
    )
    pages = 1 + MAX_BATCH * (CONTEXT // PAGE)
    stored = torch.randn(
        PagedKVCache.for_model(model.config, num_pages=pages, page_size=PAGE).storage.shape
    ).bfloat16()
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
