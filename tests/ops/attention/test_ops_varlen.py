"""Attention over packed sequences against its reference."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from ops_cases import (
    E4M3,
    FLOATS,
    PagedCase,
    assert_close,
    assert_same_bits,
    dequantized,
    int32,
    laid_out,
    quantized_randn,
)

from ostinato import ops
from ostinato.ops import reference
from ostinato.ops.attention.batch_torch import attend_capacity
from ostinato.ops.attention.kv_view import PackedKV
from ostinato.ops.attention.softmax_torch import LogitRule


def build(
    q_lens: list[int],
    k_lens: list[int],
    device: torch.device,
    *,
    heads: tuple[int, int] = (4, 2),
    dim: int = 16,
    value_dim: int | None = None,
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype | None = None,
    layout: str = "dense",
) -> tuple[Any, ...]:
    """Return q, k, v and both cu_seqlens; k and v end in rows of NaN that no sequence owns."""
    q = torch.randn(sum(q_lens), heads[0], dim).to(dtype)
    tensors = []
    for size in (dim, value_dim or dim):
        spare = torch.full((3, heads[1], size), 127 if kv_dtype is torch.int8 else math.nan)
        live = quantized_randn((sum(k_lens), heads[1], size), kv_dtype or dtype)
        x = torch.cat([live.float(), spare]).to(kv_dtype or dtype)
        tensors.append(laid_out(x.to(device), layout))
    cu_seqlens = [
        int32([sum(lens[:b]) for b in range(len(lens) + 1)], device) for lens in (q_lens, k_lens)
    ]
    return (q.to(device), *tensors, *cu_seqlens)


def check(args: tuple[Any, ...], capacities: tuple[int, int], **options: Any) -> None:
    q, k = args[:2]
    # Weights of a kernel are rounded to 16 bits.
    by_kernel = q.is_cuda and q.dtype is not torch.float32
    seen, rest = args, dict(options)
    if by_kernel and k.dtype is not q.dtype:
        scales = (rest.pop("k_scale"), rest.pop("v_scale"))
        pairs = zip(args[1:3], scales, strict=True)
        seen = (q, *(dequantized(x, scale, q.dtype) for x, scale in pairs), *args[3:])

    def twin(dtype: torch.dtype) -> torch.Tensor:
        return reference.varlen_attention(*seen, **rest, dtype=dtype)[0]

    out = ops.varlen_attention(*args, *capacities, **options)
    assert_close(out, twin, rounded_once=not by_kernel)
    again, lse = ops.varlen_attention(*args, *capacities, **options, return_lse=True)
    assert_close(again, twin, rounded_once=not by_kernel)
    _, expected = reference.varlen_attention(*seen, **rest, dtype=torch.float64)
    torch.testing.assert_close(lse, expected.float(), rtol=1e-5, atol=1e-5)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"causal": False},
    {"scale": 0.5},
    {"softcap": 1.0},
    {"window": (3, -1)},
    {"window": (2, 4), "causal": False},
    {"window": (-1, 2), "causal": False},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_error_is_within_twice_torchs(
    options: dict[str, Any], dtype: torch.dtype, device: torch.device
) -> None:
    args = build([9, 0, 1, 5, 3], [9, 4, 12, 2, 0], device, dtype=dtype)
    check(args, (9, 12), **options)


@pytest.mark.parametrize("heads", [(1, 1), (3, 1), (10, 2), (4, 4)])
@pytest.mark.parametrize("layout", ["dense", "heads first", "strided"])
def test_groups_and_strides(heads: tuple[int, int], layout: str, device: torch.device) -> None:
    check(build([5, 2], [7, 2], device, heads=heads, dim=6, layout=layout), (5, 7))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dims", [(24, 16), (6, 10), (16, 1)], ids=str)
def test_values_of_another_dim(
    dims: tuple[int, int], options: dict[str, Any], dtype: torch.dtype, device: torch.device
) -> None:
    dim, value_dim = dims
    args = build([9, 0, 1, 5, 3], [9, 4, 12, 2, 0], device, dim=dim, value_dim=value_dim)
    args = (*(x.to(dtype) for x in args[:3]), *args[3:])
    assert ops.varlen_attention(*args, 9, 12, **options).shape == (18, 4, value_dim)
    check(args, (9, 12), **options)


@pytest.mark.parametrize("layout", ["dense", "heads first", "strided"])
@pytest.mark.parametrize("kv_dtype", [torch.int8, E4M3], ids=str)
def test_quantized_values_of_another_dim(
    kv_dtype: torch.dtype, layout: str, device: torch.device
) -> None:
    args = build([3, 6], [11, 6], device, dim=24, value_dim=16, kv_dtype=kv_dtype, layout=layout)
    k_scale, v_scale = (torch.rand(20, 2).to(device) / 32 + 0.01 for _ in "kv")
    check(args, (6, 11), k_scale=k_scale, v_scale=v_scale)


def test_fp8_queries_of_another_dim_than_the_values(device: torch.device) -> None:
    q, *rest = build([3, 6], [11, 6], device, dim=192, value_dim=128, kv_dtype=E4M3)
    q = (q * 16).to(E4M3)
    scales = {f"{x}_scale": torch.rand(2).to(device) / 16 + 0.03 for x in "qkv"}
    got = ops.varlen_attention(q, *rest, 6, 11, **scales)

    def twin(dtype: torch.dtype) -> torch.Tensor:
        return reference.varlen_attention(q, *rest, **scales, dtype=dtype)[0]

    assert_close(got, twin)


@pytest.mark.parametrize("causal", [True, False])
def test_the_reference_of_values_of_another_dim_is_a_plain_softmax(causal: bool) -> None:
    q, k, v = (torch.randn(n, h, d).double() for n, h, d in ((5, 4, 24), (9, 2, 24), (9, 2, 16)))
    got, lse = reference.attention(q, k, v, causal=causal, dtype=torch.float64)
    logits = torch.einsum("ihd,jhd->hij", q, k.repeat_interleave(2, dim=1)) / math.sqrt(24)
    if causal:
        hidden = torch.arange(9) > torch.arange(4, 9).unsqueeze(1)
        logits = logits.masked_fill(hidden, -math.inf)
    values = v.repeat_interleave(2, dim=1)
    expected = torch.einsum("hij,jhd->ihd", logits.softmax(dim=-1), values)
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(lse, logits.logsumexp(dim=-1).t())


def test_sinks(device: torch.device) -> None:
    args = build([3, 2], [5, 1], device)
    check(args, (3, 5), sinks=torch.tensor([0.0, 3.0, -5.0, -math.inf], device=device))


@pytest.mark.parametrize("kv_dtype", [torch.int8, E4M3], ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (2,), (20, 2)])
def test_quantized_keys(
    kv_dtype: torch.dtype, shape: tuple[int, ...], device: torch.device
) -> None:
    args = build([3, 6], [11, 6], device, kv_dtype=kv_dtype, dtype=torch.bfloat16)
    k_scale, v_scale = (torch.rand(shape).to(device) / 32 + 0.01 for _ in range(2))
    check(args, (6, 11), k_scale=k_scale, v_scale=v_scale)


@pytest.mark.parametrize("out_dtype", [None, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (2,)])
@pytest.mark.parametrize("options", [{}, {"softcap": 1.0}, {"window": (3, -1)}], ids=str)
def test_fp8_queries(
    options: dict[str, Any],
    shape: tuple[int, ...],
    out_dtype: torch.dtype | None,
    device: torch.device,
) -> None:
    q, *rest = build([3, 6], [11, 6], device, kv_dtype=E4M3)
    q = (q * 16).to(E4M3)
    scales = {f"{x}_scale": torch.rand(shape).to(device) / 16 + 0.03 for x in "qkv"}
    out = None if out_dtype is None else torch.empty(q.shape, dtype=out_dtype, device=device)
    got = ops.varlen_attention(q, *rest, 6, 11, out=out, **scales, **options)
    assert got.dtype is (out_dtype or torch.bfloat16)

    def twin(dtype: torch.dtype) -> torch.Tensor:
        return reference.varlen_attention(q, *rest, **scales, **options, dtype=dtype)[0]

    assert_close(got, twin)


def test_the_scale_of_fp8_queries_is_that_of_their_kv_head(device: torch.device) -> None:
    q, *rest = build([4], [9], device, kv_dtype=E4M3)
    q, one = q.to(E4M3), torch.ones((), device=device)
    scales = {"k_scale": one, "v_scale": one}
    each = torch.tensor([0.5, 2.0], device=device)
    both = ops.varlen_attention(q, *rest, 4, 9, q_scale=each, **scales)
    for kv_head, heads in enumerate((slice(0, 2), slice(2, 4))):
        alone = ops.varlen_attention(q, *rest, 4, 9, q_scale=each[kv_head], **scales)
        assert_same_bits(both[:, heads], alone[:, heads])


def test_no_keys_at_all(device: torch.device) -> None:
    q, k, v, cu_q, _ = build([2, 1], [0, 0], device)
    none = int32([0, 0, 0], device)
    out, lse = ops.varlen_attention(q, k[:0], v[:0], cu_q, none, 2, 1, return_lse=True)
    assert (out == 0).all()
    out = ops.varlen_attention(q, k[:0], v[:0, :, :7], cu_q, none, 2, 1)
    assert out.shape == (3, 4, 7)
    assert (out == 0).all()
    assert (lse == -math.inf).all()
    scale = torch.ones(0, 2, device=device)
    k8 = torch.zeros(0, 2, 16, dtype=torch.int8, device=device)
    out = ops.varlen_attention(q, k8, k8, cu_q, none, 2, 1, k_scale=scale, v_scale=scale)
    assert (out == 0).all()


@pytest.mark.parametrize("value_dim", [16, 8])
@pytest.mark.parametrize("kv_dtype", [None, torch.int8, E4M3], ids=str)
def test_working_through_capacities_needs_no_lengths(
    kv_dtype: torch.dtype | None, value_dim: int, device: torch.device
) -> None:
    """The way of CUDA, which reads nothing on the host, also runs where the CPU can check it."""
    q, k, v, cu_q, cu_k = build(
        [3, 0, 6], [11, 4, 6], device, value_dim=value_dim, kv_dtype=kv_dtype
    )
    scale = None if kv_dtype is None else torch.rand(k.shape[:2]).to(device)
    out = torch.zeros(9, 4, value_dim, device=device)
    kv = PackedKV(k, v, scale, scale, cu_k)
    rule = LogitRule(0.25, True, -1, -1, 0.0)
    attend_capacity(q, cu_q, 9, cu_k.diff(), 20, kv, rule, None, out, None)

    def twin(dtype: torch.dtype) -> torch.Tensor:
        return reference.varlen_attention(
            q, k, v, cu_q, cu_k, scale=0.25, k_scale=scale, v_scale=scale, dtype=dtype
        )[0]

    assert_close(out, twin)


def test_capacities_may_exceed_the_rows(device: torch.device) -> None:
    args = build([3, 2], [5, 4], device)
    expected = ops.varlen_attention(*args, 3, 5)
    assert_same_bits(ops.varlen_attention(*args, 2**64, 2**64), expected)


def test_no_queries_and_no_sequences(device: torch.device) -> None:
    q, k, v, _, cu_k = build([0, 0], [3, 0], device)
    assert ops.varlen_attention(q, k, v, int32([0, 0, 0], device), cu_k, 1, 3).shape == (0, 4, 16)
    q, k, v, _, cu_k = build([], [], device)
    assert ops.varlen_attention(q, k, v, cu_k, cu_k, 1, 1).shape == (0, 4, 16)
    assert ops.varlen_attention(q, k, v[..., :3], cu_k, cu_k, 1, 1).shape == (0, 4, 3)


def test_rows_of_no_sequence_are_left_alone(device: torch.device) -> None:
    q, k, v, cu_q, cu_k = build([2, 1], [2, 4], device)
    longer = torch.cat([q, torch.full_like(q[:2], math.nan)])
    out = torch.full_like(longer, 3.0)
    ops.varlen_attention(longer, k, v, cu_q, cu_k, 2, 4, out=out)
    assert (out[3:] == 3.0).all()
    assert_same_bits(out[:3], ops.varlen_attention(q, k, v, cu_q, cu_k, 2, 4))


def test_packed_and_paged_keys_give_the_same_bits(device: torch.device) -> None:
    case = PagedCase(k_lens=(9, 21), q_lens=(4, 21), window=(6, -1))
    (q, k_cache, v_cache, table, _), options = case.build(device)
    paged = ops.paged_attention(q, k_cache, v_cache, table, int32([9, 21], device), **options)
    packed = [
        torch.cat(
            [
                cache[table[0, :2].long()].flatten(0, 1)[:9],
                cache[table[1, :3].long()].flatten(0, 1)[:21],
            ]
        )
        for cache in (k_cache, v_cache)
    ]
    cu_k = int32([0, 9, 30], device)
    varlen = ops.varlen_attention(q, *packed, options["cu_seqlens_q"], cu_k, 21, 21, window=(6, -1))
    assert_same_bits(varlen, paged)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_heads_may_share_memory(dtype: torch.dtype, device: torch.device) -> None:
    """Let one KV head be seen as two, of packed keys and of pages, in steps and in prompts."""
    one = torch.randn(32, 1, 64).to(dtype).to(device)
    two = one.expand(-1, 2, -1)
    lens, table = int32([32], device), int32([0, 1], device).view(1, 2)
    for tokens in (1, 20):
        q, cu_q = torch.randn(tokens, 8, 64).to(dtype).to(device), int32([0, tokens], device)
        exact, _ = reference.varlen_attention(q, one, one, cu_q, int32([0, 32], device))
        packed = ops.varlen_attention(q, two, two, cu_q, int32([0, 32], device), tokens, 32)
        pages = two.unflatten(0, (2, 16))
        options = {"cu_seqlens_q": cu_q, "max_seqlen_q": tokens}
        for out in (packed, ops.paged_attention(q, pages, pages, table, lens, **options)):
            torch.testing.assert_close(out, exact.to(dtype))
