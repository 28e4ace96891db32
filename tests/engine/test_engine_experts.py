"""Engines of models with mixtures of experts: tokens depend on their own sequence alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from shared_beginnings import check_shared_beginnings
from tiny_experts import FAMILIES, tiny_experts

from effort import effort
from ostinato.engine import Engine, SamplingParams
from ostinato.models import Decoder
from ostinato.models.families.moe.mixture import MixtureLlama
from serving import make_engine, make_service, serving
from tiny import KV_CACHES, byte_tokenizer

PARAMS = SamplingParams(max_tokens=10, ignore_eos=True)
PRECISIONS = ("bf16", "int8", "fp8", "fp8-block")
CASES = effort(
    [("glm4_moe", "int8"), ("qwen2_moe", "fp8")],
    [(family, precision) for family in FAMILIES for precision in PRECISIONS],
)


def engine_of(model: Decoder, **options: Any) -> Engine:
    defaults: dict[str, Any] = {"max_batch": 12, "page_size": 4, "prefill_chunk": 16}
    return Engine(model, byte_tokenizer(), **{**defaults, **options})


@pytest.mark.parametrize(("family", "precision"), CASES)
def test_tokens_are_those_of_a_sequence_alone(
    family: str, precision: str, device: torch.device
) -> None:
    """In graphs of 1, 3 and 12 sequences, full and padded, and beside prompts of any length."""
    engine = engine_of(tiny_experts(family, precision, device))
    report = engine.capture([1, 3, 12], progress=False)  # replays are verified bit for bit
    assert {graph.verdict for graph in report.graphs} <= {"bit-equal", "not captured"}
    prompts = [[(7 * i + 3 * j) % 256 for j in range(2 + 3 * i)] for i in range(11)]
    together = [completion.token_ids for completion in engine.generate(prompts, PARAMS)]
    for prompt, tokens in zip(prompts[::5], together[::5], strict=True):
        (alone,) = engine.generate([prompt], PARAMS)
        assert alone.token_ids == tokens
    assert len(set(together)) > 5


@pytest.mark.parametrize("precision", effort(["int8"], ["bf16", "int8", "fp8-block"]))
def test_nan_in_a_routers_logits_ends_its_request_alone(
    precision: str, device: torch.device
) -> None:
    model = tiny_experts("qwen3_moe", precision, device)
    assert isinstance(model, MixtureLlama)
    model.embedding[7] = torch.nan
    engine = engine_of(model)
    engine.capture([1, 3], progress=False)
    wrong, right = [5, 7, 9], [5, 6, 9, 11]
    (alone,) = engine.generate([right], PARAMS)
    broken, beside = engine.generate([wrong, right], PARAMS)
    assert broken.finish_reason == "error"
    assert broken.token_ids == ()
    assert beside.token_ids == alone.token_ids


@pytest.mark.parametrize("cache", effort(["int8"], ["fp8", "int8"]))
def test_prefixes_are_shared_whatever_the_cache(cache: str, device: torch.device) -> None:
    model = tiny_experts("qwen3_moe", "int8", device)
    prefix = list(range(40, 56))
    prompts = [[*prefix, 7], [*prefix, 9, 10, 11], prefix]
    options = KV_CACHES[cache]
    engine = engine_of(model, **options)
    engine.capture([1], progress=False)
    shared = [engine.generate([prompt], PARAMS)[0].token_ids for prompt in prompts]
    assert engine.stats.prefill_tokens < 17 + 19 + 16
    for prompt, tokens in zip(prompts[:2], shared, strict=False):
        fresh = engine_of(model, **options)
        fresh.capture([1], progress=False)
        assert fresh.generate([prompt], PARAMS)[0].token_ids == tokens


@pytest.mark.parametrize(("family", "precision"), effort(CASES[:1], CASES))
def test_prefixes_shared_by_the_page_change_no_bit(family: str, precision: str) -> None:
    engine = engine_of(tiny_experts(family, precision), prefill_chunk=32, logits_processing=True)
    engine.capture([1], progress=False)
    base = [(7 * at + at // 11) % 200 + 40 for at in range(91)]
    check_shared_beginnings(engine, base, [4, 28, 32, 44, 88])


def test_a_server_gives_the_engines_texts() -> None:
    model = tiny_experts("mixtral", "fp8")
    expected = make_engine(model=model).generate(["some prompt"], PARAMS)[0].text
    service = make_service(lambda: make_engine(model=model))
    with serving(service) as client:
        document = client.complete("some prompt", max_tokens=10, ignore_eos=True, temperature=0)
    assert document["choices"][0]["text"] == expected
