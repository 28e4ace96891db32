"""Attention over a paged cache against its reference."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from ops_cases import E4M3, FLOATS, PagedCase, assert_close, assert_same_bits, int32

from ostinato import ops
from ostinato.ops import reference
from ostinato.ops.attention import batch_torch, checks
from ostinato.ops.attention.batch_torch import attend_capacity
from ostinato.ops.attention.kv_view import PagedKV
from ostinato.ops.attention.softmax_torch import LogitRule

MIXED = PagedCase(k_lens=(5, 0, 40, 9, 12), q_lens=(1, 0, 7, 9, 2))
FEATURES = [
    *(PagedCase(dtype=dtype) for dtype in FLOATS),
    *(PagedCase(heads_q=q, heads_kv=kv) for q, kv in [(1, 1), (3, 1), (6, 2), (5, 5), (8, 1)]),
    *(PagedCase(page_size=size) for size in (1, 2, 5, 16, 64)),
    *(PagedCase(dim=dim) for dim in (1, 7, 64, 80)),
    *(PagedCase(dim=dim, value_dim=value_dim) for dim, value_dim in [(24, 16), (8, 40), (5, 1)]),
    PagedCase(k_lens=(0, 1, 0, 3)),
    PagedCase(k_lens=(0, 0)),
    PagedCase(k_lens=(300,), page_size=16),
    PagedCase(scale=0.3),
    PagedCase(scale=0.0),
    PagedCase(scale=-1.0),
    PagedCase(softcap=2.0),
    PagedCase(sinks=True),
    PagedCase(sinks=True, k_lens=(0, 3)),
    *(PagedCase(window=window) for window in [(0, 0), (3, -1), (-1, 0), (100, 100)]),
    *(PagedCase(layout=layout) for layout in ("heads first", "strided")),
    PagedCase(max_seqlen_q=3, k_lens=(3, 10, 2, 0)),
    MIXED,
    replace(MIXED, dtype=torch.bfloat16, layout="heads first"),
    replace(MIXED, causal=False),
    *(replace(MIXED, window=window) for window in [(4, -1), (0, 0), (2, 3), (9, 0)]),
    *(replace(MIXED, causal=False, window=window) for window in [(2, 3), (-1, 1), (4, -1)]),
    replace(MIXED, softcap=1.5, sinks=True, window=(5, -1), dtype=torch.bfloat16),
    replace(MIXED, softcap=1.5, sinks=True, window=(5, -1), value_dim=9, layout="strided"),
    PagedCase(k_lens=(4, 1), q_lens=(6, 3)),
    PagedCase(k_lens=(9, 20), q_lens=(0, 3), window=(5, -1)),
    PagedCase(k_lens=(4, 1), q_lens=(6, 3), sinks=True, causal=False, window=(2, 1)),
    *(
        PagedCase(cache_dtype=cache_dtype, scale_kind=kind, dtype=torch.bfloat16)
        for cache_dtype in (torch.int8, E4M3)
        for kind in ("scalar", "one", "head", "token")
    ),
    replace(MIXED, cache_dtype=E4M3, scale_kind="token", layout="strided", window=(6, -1)),
    replace(MIXED, cache_dtype=torch.int8, scale_kind="token", heads_kv=1, heads_q=3),
    replace(MIXED, cache_dtype=E4M3, scale_kind="token", dim=24, value_dim=16),
]


def by_kernel(case: PagedCase, device: torch.device) -> bool:
    """Return whether a kernel attends, whose weights are rounded to 16 bits."""
    return device.type == "cuda" and case.dtype is not torch.float32


@pytest.mark.parametrize("case", FEATURES, ids=str)
def test_error_is_within_twice_torchs(case: PagedCase, device: torch.device) -> None:
    args, options = case.build(device)
    out = ops.paged_attention(*args, **options)
    with_lse, lse = ops.paged_attention(*args, **options, return_lse=True)
    for result in (out, with_lse):
        assert_close(result, case.twin(args, options), rounded_once=not by_kernel(case, device))
    _, expected = reference.paged_attention(*args, **options, dtype=torch.float64)
    assert lse.shape == out.shape[:2]
    torch.testing.assert_close(lse, expected.float(), rtol=1e-5, atol=1e-5)


_WIDE = replace(MIXED, dtype=torch.bfloat16, dim=128, page_size=16)


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("front", [1, 3, 130])
@pytest.mark.parametrize(
    "case",
    [
        *(MIXED, _WIDE, replace(_WIDE, q_lens=(5, 0, 40, 9, 12), window=(6, -1), sinks=True)),
        *(replace(_WIDE, cache_dtype=cache, scale_kind="token") for cache in (torch.int8, E4M3)),
    ],
    ids=str,
)
def test_rows_in_front_of_all_sequences_are_not_written(
    case: PagedCase, front: int, invariant: bool, device: torch.device
) -> None:
    (q, *others), options = case.build(device)
    options["batch_invariant"] = invariant
    expected, expected_lse = ops.paged_attention(q, *others, **options, return_lse=True)
    padded = torch.cat([torch.full_like(q[:1], math.nan).expand(front, -1, -1), q, q[:1]])
    out = torch.full((len(padded), *expected.shape[1:]), 7.0, dtype=q.dtype, device=device)
    options["cu_seqlens_q"] = options["cu_seqlens_q"] + front
    _, lse = ops.paged_attention(padded, *others, **options, out=out, return_lse=True)
    own = slice(front, front + len(q))
    if invariant or device.type == "cpu":
        assert_same_bits(out[own], expected)
        assert_same_bits(lse[own], expected_lse)
    else:
        torch.testing.assert_close(out[own], expected, rtol=2e-2, atol=2e-2)
    assert (out[:front] == 7).all()
    assert (out[front + len(q) :] == 7).all()
    assert (lse[:front] == -math.inf).all()


@settings(max_examples=40)
@given(st.data())
def test_random_combinations(data: st.DataObject) -> None:
    draw = data.draw
    q_lens = draw(st.lists(st.integers(0, 6), min_size=1, max_size=4))
    k_lens = [max(0, q + draw(st.integers(-3, 30))) for q in q_lens]
    heads_kv = draw(st.integers(1, 3))
    case = PagedCase(
        k_lens=tuple(k_lens),
        q_lens=tuple(q_lens) if any(q_lens) else (1, *q_lens[1:]),
        heads_kv=heads_kv,
        heads_q=heads_kv * draw(st.integers(1, 5)),
        dim=draw(st.sampled_from([3, 8, 32])),
        value_dim=draw(st.sampled_from([None, 4, 24])),
        page_size=draw(st.sampled_from([1, 3, 4, 16])),
        causal=draw(st.booleans()),
        window=draw(st.none() | st.tuples(st.integers(-1, 9), st.integers(-1, 9))),
        softcap=draw(st.sampled_from([0.0, 3.0])),
        sinks=draw(st.booleans()),
        dtype=draw(st.sampled_from(FLOATS)),
        cache_dtype=draw(st.sampled_from([None, torch.int8, E4M3])),
        scale_kind=draw(st.sampled_from(["scalar", "head", "token"])),
        layout=draw(st.sampled_from(["dense", "heads first", "strided"])),
    )
    args, options = case.build(torch.device("cpu"))
    out, lse = ops.paged_attention(*args, **options, return_lse=True)
    assert_close(out, case.twin(args, options))
    _, expected = reference.paged_attention(*args, **options, dtype=torch.float64)
    torch.testing.assert_close(lse, expected.float(), rtol=1e-5, atol=1e-5)
    assert_close(ops.paged_attention(*args, **options), case.twin(args, options))


def by_capacities(
    case: PagedCase, args: tuple[torch.Tensor, ...], options: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (out, lse) in the way of CUDA, which reads nothing on the host, on any device."""
    q, k_cache, v_cache, table, lens = args
    capacity = options["max_seqlen_q"]
    cu_seqlens_q = options.get("cu_seqlens_q")
    if cu_seqlens_q is None:
        cu_seqlens_q = torch.arange(len(lens) + 1, device=q.device) * capacity
    scale = case.dim**-0.5 if case.scale is None else case.scale
    out = torch.zeros(*q.shape[:2], v_cache.size(3), dtype=q.dtype, device=q.device)
    lse = torch.zeros(q.shape[:2], device=q.device)
    attend_capacity(
        q,
        cu_seqlens_q,
        capacity,
        lens,
        table.size(1) * case.page_size,
        PagedKV(k_cache, v_cache, options.get("k_scale"), options.get("v_scale"), table),
        LogitRule(scale, case.causal, *(case.window or (-1, -1)), case.softcap),
        options.get("sinks"),
        out,
        lse,
    )
    return out, lse


def by_the_op(
    _case: PagedCase, args: tuple[torch.Tensor, ...], options: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    return ops.paged_attention(*args, **options, return_lse=True)


@pytest.mark.parametrize("case", FEATURES, ids=str)
@pytest.mark.parametrize("tiles", [None, (2, 8)])
def test_working_through_capacities_needs_no_lengths(
    case: PagedCase,
    tiles: tuple[int, int] | None,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if tiles is not None:
        monkeypatch.setattr(batch_torch, "QUERY_TILE", tiles[0])
        monkeypatch.setattr(batch_torch, "KEY_TILE", tiles[1])
    args, options = case.build(device)
    out, lse = by_capacities(case, args, options)
    assert_close(out, case.twin(args, options))
    _, expected = reference.paged_attention(*args, **options, dtype=torch.float64)
    torch.testing.assert_close(lse, expected.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("run", [by_the_op, by_capacities])
@pytest.mark.parametrize("window", [None, (2, -1)])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_a_key_has_no_part_in_queries_that_do_not_see_it(
    run: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    window: tuple[int, int] | None,
    causal: bool,
    poison: float,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(batch_torch, "KEY_TILE", 4)
    case = PagedCase(k_lens=(8,), q_lens=(4,), window=window, causal=causal)
    args, options = case.build(device)
    _, k_cache, v_cache, table, _ = args
    clean, clean_lse = run(case, args, options)
    assert clean.isfinite().all()
    for key in range(case.first_seen(8, 4), 8):
        seen = torch.tensor(
            [(not causal or key <= p) and (window is None or key >= p - 2) for p in range(4, 8)]
        )
        value = v_cache[table[0, 0], key, 1, 3].clone()
        v_cache[table[0, 0], key, 1, 3] = poison
        expected = clean.clone()
        expected[seen, 2:, 3] = poison
        out, lse = run(case, args, options)
        torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)
        assert_same_bits(lse, clean_lse)
        v_cache[table[0, 0], key, 1, 3] = value

        row = k_cache[table[0, 0], key, 1].clone()
        k_cache[table[0, 0], key, 1] = math.nan
        expected = clean.clone()
        expected[seen, 2:] = math.nan
        out, _ = run(case, args, options)
        torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)
        k_cache[table[0, 0], key, 1] = row


def test_infinities_of_both_signs_make_nan_and_of_one_stay(device: torch.device) -> None:
    case = PagedCase(k_lens=(8,), q_lens=(1,))
    args, options = case.build(device)
    live = args[2][args[3][0, 0]]
    live[[1, 2, 6], :, [0, 1, 1]] = math.inf
    live[5, :, 0] = -math.inf
    for out, _ in (by_the_op(case, args, options), by_capacities(case, args, options)):
        assert out[..., 0].isnan().all()
        assert (out[..., 1] == math.inf).all()
        assert out[..., 2:].isfinite().all()


@pytest.mark.parametrize(
    ("window", "plain"),
    [
        ((-1, sys.maxsize), (-1, -1)),
        ((sys.maxsize, -1), (-1, -1)),
        ((2**64, 2**64), (-1, -1)),
        ((3, 2**80), (3, -1)),
    ],
)
@pytest.mark.parametrize("causal", [True, False])
def test_a_window_may_be_wider_than_any_sequence(
    window: tuple[int, int], plain: tuple[int, int], causal: bool, device: torch.device
) -> None:
    case = PagedCase(k_lens=(12, 9), q_lens=(4, 1), causal=causal, window=plain)
    args, options = case.build(device)
    expected = ops.paged_attention(*args, **options)
    assert_same_bits(ops.paged_attention(*args, **{**options, "window": window}), expected)


def test_the_widest_window_does_not_overflow(device: torch.device) -> None:
    q = torch.zeros(1, 1, 1, device=device)
    rule = checks.options(q, 1, None, False, (sys.maxsize, sys.maxsize), 0.0, None, None, None)
    position = torch.tensor([0, 2**31 - 2], device=device)
    first, stop = rule.spans(position, torch.tensor(2**31 - 1, device=device))
    assert first.tolist() == [0, 0]
    assert stop.tolist() == [2**31 - 1] * 2


def test_a_capacity_may_exceed_the_queries(device: torch.device) -> None:
    args, options = MIXED.build(device)
    expected = ops.paged_attention(*args, **options)
    options["max_seqlen_q"] = 2**64
    assert_same_bits(ops.paged_attention(*args, **options), expected)


@pytest.mark.parametrize("case", FEATURES, ids=str)
def test_the_output_does_not_depend_on_asking_for_the_lse(
    case: PagedCase, device: torch.device
) -> None:
    args, options = case.build(device)
    out, _ = ops.paged_attention(*args, **options, return_lse=True)
    assert_same_bits(out, ops.paged_attention(*args, **options))


def test_queries_without_keys_give_zero_and_minus_infinity(device: torch.device) -> None:
    case = PagedCase(k_lens=(2, 0), q_lens=(4, 1), sinks=True)
    args, options = case.build(device)
    out, lse = ops.paged_attention(*args, **options, return_lse=True)
    assert_same_bits(out[[0, 1, 4]], torch.zeros_like(out[:3]))
    assert (lse[[0, 1, 4]] == -math.inf).all()
    assert lse[[2, 3]].isfinite().all()


def test_zero_queries_give_the_mean_of_the_visible_values(device: torch.device) -> None:
    case = PagedCase(k_lens=(13,), q_lens=(5,), heads_q=2, heads_kv=2, window=(3, -1))
    (q, k_cache, v_cache, table, lens), options = case.build(device)
    q = torch.zeros_like(q)
    out, lse = ops.paged_attention(q, k_cache, v_cache, table, lens, **options, return_lse=True)
    values = v_cache[table[0, :2].long()].flatten(0, 1)
    for i in range(5):
        mean = values[8 + i - 3 : 8 + i + 1].mean(0)
        torch.testing.assert_close(out[i], mean)
    torch.testing.assert_close(lse, torch.full_like(lse, math.log(4)))


def test_lengths_beyond_the_table_are_clamped(device: torch.device) -> None:
    (q, k_cache, v_cache, _, _), options = PagedCase(k_lens=(16, 16)).build(device)
    k_cache, v_cache = k_cache.nan_to_num(), v_cache.nan_to_num()
    table = int32([0, 1, 2, 3], device).view(2, 2)
    full = ops.paged_attention(q, k_cache, v_cache, table, int32([16, 0], device), **options)
    beyond = int32([1000, -5], device)
    assert_same_bits(ops.paged_attention(q, k_cache, v_cache, table, beyond, **options), full)


def test_out_is_written_only_where_sequences_are(device: torch.device) -> None:
    args, options = MIXED.build(device)
    q = torch.cat([args[0], torch.full_like(args[0][:3], math.nan)])
    out = torch.full_like(q, 7.0)
    returned = ops.paged_attention(q, *args[1:], **options, out=out)
    assert returned.data_ptr() == out.data_ptr()
    assert (out[-3:] == 7.0).all()
    assert_same_bits(out[:-3], ops.paged_attention(*args, **options))
    fresh, lse = ops.paged_attention(q, *args[1:], **options, return_lse=True)
    assert (fresh[-3:] == 0.0).all()
    assert (lse[-3:] == -math.inf).all()


def test_out_may_be_strided(device: torch.device) -> None:
    args, options = PagedCase().build(device)
    out = torch.zeros(4, 9, 16, device=device)[:, 2:6]
    ops.paged_attention(*args, **options, out=out)
    assert_same_bits(out, ops.paged_attention(*args, **options))


def test_empty_batches(device: torch.device) -> None:
    (q, k_cache, v_cache, table, lens), options = PagedCase().build(device)
    out = ops.paged_attention(q[:0], k_cache, v_cache, table[:0], lens[:0], **options)
    assert out.shape == (0, 4, 16)


@pytest.mark.parametrize("case", FEATURES, ids=str)
def test_check_bounds_accepts_what_is_right(case: PagedCase, device: torch.device) -> None:
    args, options = case.build(device)
    checked = ops.paged_attention(*args, **options, check_bounds=True)
    assert_same_bits(checked, ops.paged_attention(*args, **options))


def test_a_workspace_changes_nothing(device: torch.device) -> None:
    args, options = PagedCase().build(device)
    workspace = torch.empty(64, dtype=torch.uint8, device=device)
    out = ops.paged_attention(*args, **options, workspace=workspace)
    assert_same_bits(out, ops.paged_attention(*args, **options))


def test_the_default_device_does_not_matter_on_the_cpu() -> None:
    args, options = PagedCase(q_lens=(3, 1), k_lens=(70, 9)).build(torch.device("cpu"))
    expected = ops.paged_attention(*args, **options)
    with torch.device("meta"):
        found = ops.paged_attention(*args, **options)
    assert_same_bits(found, expected)
