"""Attention of models over 8-bit KV caches: what it computes, and what it must not see."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_models_llama import TOKENS, run_in_pieces

from ostinato import ops
from ostinato.cli import model_flags
from ostinato.models import KVFormat, PagedKVCache, kv_format, sequence_logits
from ostinato.models.families.llama import Llama
from ostinato.models.kv_format import AUTO, KV_DTYPES, SCALE_KINDS
from ostinato.ops import reference
from ostinato.ops.attention import dequantize_kv, prefill_cuda
from ostinato.ops.common.e4m3 import as_bytes
from tiny import KV_CACHES, tiny_llama

EIGHT_BITS = [cache for cache in KV_CACHES if cache != "model"]
PIECES = [[21], [1] * 21, [8, 8, 5], [1, 19, 1]]


def format_of(model: Llama, cache: str) -> KVFormat:
    options = KV_CACHES[cache]
    dtype, scales = options.get("kv_cache_dtype", "auto"), options.get("kv_scales")
    return kv_format(model.config, model.kv_scales, dtype, scales)


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Compare each call of attention with one over the dequantised cache; count the queries."""
    calls: list[int] = []
    attend = ops.paged_attention

    def both(
        q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, *args: Any, **options: Any
    ) -> Any:
        out = attend(q, k_cache, v_cache, *args, **options)
        assert isinstance(out, torch.Tensor)
        scales = options.pop("k_scale"), options.pop("v_scale")
        k, v = (
            reference.dequantized(cache, scale, torch.float32).to(q.dtype)
            for cache, scale in zip((k_cache, v_cache), scales, strict=True)
        )
        options["out"] = None
        exact = attend(q, k, v, *args, **options)
        assert isinstance(exact, torch.Tensor)
        torch.testing.assert_close(out, exact, atol=1e-5, rtol=1e-5)
        calls.append(q.size(0))
        return out

    monkeypatch.setattr(ops, "paged_attention", both)
    return calls


@pytest.mark.parametrize("cache", EIGHT_BITS)
@pytest.mark.parametrize("pieces", PIECES, ids=str)
def test_attention_is_that_of_the_dequantised_cache(
    cache: str, pieces: list[int], compared: list[int], device: torch.device
) -> None:
    model = tiny_llama(device, cache=cache)
    run_in_pieces(model, [TOKENS, TOKENS[::-1]], pieces, format_of(model, cache))
    assert sum(compared) == 2 * 2 * len(TOKENS)  # of two layers and two sequences


@pytest.mark.parametrize("cache", EIGHT_BITS)
@pytest.mark.parametrize("pieces", PIECES, ids=str)
def test_a_sequence_may_be_cut_anywhere_in_8_bits(
    cache: str, pieces: list[int], device: torch.device
) -> None:
    model = tiny_llama(device, cache=cache)
    stored = format_of(model, cache)
    exact = sequence_logits(model, TOKENS, cache_format=stored)
    got = run_in_pieces(model, [TOKENS], pieces, stored)[0]
    # What is rounded to 8 bits is the same but for the last bits of fp32: at times another code.
    assert (got - exact).abs().median() < 1e-4 * exact.std()


@pytest.mark.parametrize("cache", EIGHT_BITS)
def test_neighbours_change_no_bit_in_8_bits(cache: str, device: torch.device) -> None:
    model = tiny_llama(device, cache=cache)
    stored = format_of(model, cache)
    sequences = [TOKENS, TOKENS[::-1], [7] * 21]
    pieces = [9, 1, 1, 10]
    together = run_in_pieces(model, sequences, pieces, stored)
    for sequence, rows in zip(sequences, together, strict=True):
        assert torch.equal(run_in_pieces(model, [sequence], pieces, stored)[0], rows)


@pytest.mark.parametrize("cache", EIGHT_BITS)
def test_dead_pages_and_scales_never_show(
    cache: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_llama(device, cache=cache)
    stored, pieces = format_of(model, cache), [9, 1, 1, 10]
    expected = run_in_pieces(model, [TOKENS, TOKENS[::-1]], pieces, stored)
    make: Callable[..., PagedKVCache] = PagedKVCache.for_model

    def poisoned(*args: Any, **options: Any) -> PagedKVCache:
        made = make(*args, **options)
        as_bytes(made.storage).fill_(127)  # NaN of e4m3
        if made.scales is not None:
            made.scales.fill_(torch.nan)
        return made

    monkeypatch.setattr(PagedKVCache, "for_model", poisoned)
    assert torch.equal(run_in_pieces(model, [TOKENS, TOKENS[::-1]], pieces, stored), expected)


@pytest.mark.parametrize("cache", EIGHT_BITS)
@pytest.mark.parametrize("part", ["q", "k", "v"])
def test_a_nan_shows_in_all_later_tokens(
    part: str, cache: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_llama(device, cache=cache)
    stored = format_of(model, cache)
    append = ops.append_kv

    def broken(k: torch.Tensor, v: torch.Tensor, *args: Any, **options: Any) -> Any:
        heads = {"q": options["q"], "k": k, "v": v}[part]
        if heads is not None and heads.size(0) > 4:
            heads[4, 0, 3] = torch.nan
        return append(k, v, *args, **options)

    monkeypatch.setattr(ops, "append_kv", broken)
    logits = run_in_pieces(model, [TOKENS], [9, 12], stored)[0]
    assert not logits[:4].isnan().any()
    assert logits[4:].isnan().all()


def test_the_command_line_knows_the_names() -> None:
    assert (AUTO, *KV_DTYPES) == model_flags.KV_CACHE_DTYPES
    assert model_flags.KV_SCALES == SCALE_KINDS


@pytest.mark.parametrize("window", [3, None])
@pytest.mark.parametrize("cache", EIGHT_BITS)
def test_windows_and_norms_of_heads_are_served(
    window: int | None, cache: str, compared: list[int], device: torch.device
) -> None:
    model = tiny_llama(device, cache=cache, sliding_windows=(window, None), qk_norm=True)
    run_in_pieces(model, [TOKENS], [13, 1, 7], format_of(model, cache))
    assert sum(compared) == 2 * len(TOKENS)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("cache", KV_CACHES)
def test_prompts_take_a_kernel_that_is_named_ahead(
    cache: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill_cuda, "has_kernel", lambda *_: True)
    model = tiny_llama(cache=cache, head_dim=64, dtype=dtype)
    stored = format_of(model, cache)
    pages = PagedKVCache.for_model(
        model.config, num_pages=3, page_size=16, device="cpu", kv_format=stored
    )
    layer = pages.layer(1)
    k_scale, v_scale = layer.stored_scales
    q = torch.zeros(70, model.config.num_heads, 64, dtype=dtype)
    table = torch.ones(1, 2, dtype=torch.int32)
    if k_scale is None:
        assert v_scale is None
        taken = prefill_cuda.paged_variant(q, layer.k, layer.v, table, q, 70, True)
    else:
        how = {"tokens": 32, "batch_invariant": True}
        taken = dequantize_kv.variant(q, layer.k, layer.v, q, 1, 70, **how)
    assert taken in model.kernels(stored)
