"""Engines over 8-bit KV caches: how much fits, and what a text loses."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import measure_kv_cache
import pytest
import torch
from measure_kv_cache import nats, scores, states

from ostinato.checkpoint import load_model, load_tokenizer
from ostinato.engine import Engine, SamplingParams, cache_size, engine
from ostinato.engine.cache_size import default_pages, page_bytes
from ostinato.models import Decoder, KVFormat, KVScales, kv_format, sequence_logits
from tiny import KV_CACHES, byte_tokenizer, tiny_llama

ROOT = Path(__file__).parents[2]
TINY_LLAMA = ROOT / "examples" / "tiny-llama"


def engine_of(model: Decoder, cache: str, **options: Any) -> Engine:
    defaults: dict[str, Any] = {"max_batch": 4, "page_size": 4, "prefill_chunk": 8}
    engine = Engine(model, byte_tokenizer(), **{**defaults, **KV_CACHES[cache], **options})
    engine.capture(progress=False)
    return engine


@pytest.mark.parametrize("cache", KV_CACHES)
def test_a_page_takes_what_its_size_says(cache: str, device: torch.device) -> None:
    model = tiny_llama(device, cache=cache)
    engine = engine_of(model, cache, num_pages=9)
    paged = [x for x in (engine.cache.storage, engine.cache.scales) if x is not None]
    each = page_bytes(model.config, engine.cache.format, 4)
    assert sum(tensor.nbytes for tensor in paged) == 9 * each


@pytest.mark.parametrize("cache", ["fp8_static", "fp8", "int8"])
def test_8_bits_hold_a_load_that_overflows_16(cache: str, device: torch.device) -> None:
    model = tiny_llama(device, head_dim=64, dtype=torch.bfloat16)
    plain, stored = (kv_format(model.config, None, **options_of(name)) for name in ("model", cache))
    memory = 15 * page_bytes(model.config, plain, 4)
    prompts = [f"prompt {i}" for i in range(4)]
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    preemptions = []
    for name, form in (("model", plain), (cache, stored)):
        pages = memory // page_bytes(model.config, form, 4)
        engine = engine_of(model, name, num_pages=pages, max_context=32)
        engine.generate(prompts, params)
        preemptions.append(engine.stats.preemptions)
    assert preemptions[0] > 0
    assert preemptions[1] == 0


def options_of(cache: str) -> dict[str, Any]:
    options = KV_CACHES[cache]
    named = {"dtype": options.get("kv_cache_dtype", "auto"), "scales": options.get("kv_scales")}
    return {name: value for name, value in named.items() if value is not None}


def test_twice_the_pages_fit_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_llama(head_dim=128, dtype=torch.bfloat16).config
    monkeypatch.setattr(cache_size, "available_memory", lambda: 1 << 22)
    counts = {}
    for cache in ("model", "fp8_static", "fp8", "int8"):
        each = page_bytes(config, kv_format(config, None, **options_of(cache)), 16)
        counts[cache] = default_pages(config.num_layers, each, 10**9, torch.device("cpu")) - 1
    assert counts["fp8_static"] == 2 * counts["model"]
    # A scale of 4 bytes beside 128 of a head.
    assert counts["int8"] == counts["fp8"] == math.floor(2 * counts["model"] / (1 + 4 / 128))


@pytest.mark.parametrize("cache", ["fp8", "int8"])
def test_8_bits_a_token_cost_little_of_a_real_model(cache: str) -> None:
    model = load_model(TINY_LLAMA)
    text = (ROOT / "docs" / "concepts.md").read_text()
    tokens = load_tokenizer(TINY_LLAMA).encode(text).ids[: model.max_context]
    assert len(tokens) > 200
    exact, stored = (kv_format(model.config, None, **options_of(name)) for name in ("model", cache))
    assert abs(nats(model, tokens, stored) / nats(model, tokens, exact) - 1) < 0.003


def test_nats_are_those_of_the_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure_kv_cache, "ROWS", 16)
    model, tokens = tiny_llama(), list(range(40))
    logits = sequence_logits(model, tokens)[:-1]
    expected = torch.nn.functional.cross_entropy(logits, torch.tensor(tokens[1:]))
    assert nats(model, tokens, KVFormat(model.config.dtype)) == pytest.approx(float(expected))


def test_divergences_are_those_of_the_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure_kv_cache, "ROWS", 16)
    model, tokens = tiny_llama(), list(range(40))
    plain, stored = KVFormat(model.config.dtype), KVFormat(torch.float8_e4m3fn, "token")
    exact, other = (
        sequence_logits(model, tokens, cache_format=form)[:-1].log_softmax(-1)
        for form in (plain, stored)
    )
    expected = torch.nn.functional.kl_div(other, exact, log_target=True, reduction="none").sum(1)
    found = scores(model, tokens, states(model, tokens, stored), states(model, tokens, plain))[1]
    torch.testing.assert_close(found.float(), expected)
    assert found.mean() > 0


@pytest.mark.parametrize(
    ("options", "compiled"),
    [
        ({}, None),
        ({"kv_scales": "static"}, None),
        # Of the same dtype, but prompts take other kernels.
        ({"kv_scales": "token"}, "fp8, a scale per token and head"),
        ({"kv_cache_dtype": "int8"}, "int8, a scale per token and head"),
        ({"kv_cache_dtype": "fp32"}, "fp32"),
    ],
)
def test_a_cache_that_was_not_loaded_for_is_compiled_for(
    options: dict[str, Any], compiled: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_llama()
    model.kv_scales = KVScales(torch.float8_e4m3fn, None, None)
    formats: list[str] = []

    def compile_kernels(_model: Decoder, cache_format: KVFormat) -> None:
        formats.append(str(cache_format))

    monkeypatch.setattr(engine, "compile_kernels", compile_kernels)
    Engine(model, byte_tokenizer(), max_batch=1, page_size=4, **options)
    assert formats == ([] if compiled is None else [compiled])
