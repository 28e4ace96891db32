"""Merging attention states: against the reference, at the edges, and as a cascade."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from ops_cases import FLOATS, assert_close, assert_same_bits, int32

from ostinato import ops
from ostinato.ops import reference

INF = math.inf


def states(
    device: torch.device, shape: tuple[int, int, int], dtype: torch.dtype = torch.float32
) -> list[torch.Tensor]:
    """Return (o_a, lse_a, o_b, lse_b) of strides that are not dense."""
    tokens, heads, dim = shape
    found = []
    for _ in range(2):
        outputs = torch.randn(tokens, 2 * heads, dim).to(dtype).to(device)[:, ::2]
        # As FlashAttention has them.
        lse = (torch.randn(heads, tokens) * 3).to(device).t()
        found += [outputs, lse]
    return found


def merged(arguments: list[torch.Tensor], **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Call the op with outputs that are poisoned, in memory of which others are to stay."""
    o_a, lse_a = arguments[:2]
    around = [
        torch.full((x.size(0), 3 * x.size(1), *x.shape[2:]), 77, dtype=x.dtype, device=x.device)
        for x in (o_a, lse_a)
    ]
    out, out_lse = (x[:, 1::3] for x in around)
    results = ops.merge_states(*arguments, out=out, out_lse=out_lse, **options)
    assert results[0] is out
    assert results[1] is out_lse
    for x in around:
        assert (x[:, ::3] == 77).all()
        assert (x[:, 2::3] == 77).all()
    return results


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(
    "shape",
    [(1, 1, 1), (3, 2, 5), (7, 3, 16), (5, 8, 64), (33, 4, 128), (2, 3, 192), (2, 2, 2100)],
    ids=str,
)
def test_states_are_weighed_by_their_denominators(
    shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device
) -> None:
    arguments = states(device, shape, dtype)
    out, lse = merged(arguments)
    assert_close(out, lambda d: reference.merge_states(*arguments, dtype=d)[0])
    assert_close(lse, lambda d: reference.merge_states(*arguments, dtype=d)[1])
    for got, poisoned in zip(ops.merge_states(*arguments), (out, lse), strict=True):
        assert_same_bits(got, poisoned)


def test_a_query_without_keys_has_no_part(device: torch.device) -> None:
    o_a, lse_a, o_b, lse_b = states(device, (4, 2, 24), torch.bfloat16)
    lse_a[0], lse_b[1] = -INF, -INF
    lse_a[2], lse_b[2] = -INF, -INF
    o_a[0] = o_b[1] = math.nan
    o_a[2], o_b[2] = math.nan, INF
    out, lse = merged([o_a, lse_a, o_b, lse_b])
    for row, o, of in ((0, o_b, lse_b), (1, o_a, lse_a)):
        assert_same_bits(out[row], o[row])
        assert_same_bits(lse[row], of[row])
    assert (out[2] == 0).all()
    assert (lse[2] == -INF).all()
    assert out[3].isfinite().all()


def test_nan_spreads_within_its_head(device: torch.device) -> None:
    o_a, lse_a, o_b, lse_b = states(device, (3, 2, 16))
    expected = merged([o_a, lse_a, o_b, lse_b])
    lse_a[0, 0] = lse_b[1, 1] = math.nan
    lse_b[0, 0] = -INF
    o_b[2, 0, 3] = math.nan
    out, lse = merged([o_a, lse_a, o_b, lse_b])
    for row, head in ((0, 0), (1, 1)):
        assert out[row, head].isnan().all()
        assert lse[row, head].isnan()
    assert out[2, 0].isnan().nonzero().tolist() == [[3]]
    for row, head in ((0, 1), (1, 0), (2, 1)):
        assert_same_bits(out[row, head], expected[0][row, head])
        assert_same_bits(lse[row, head], expected[1][row, head])


def test_one_state_far_above_the_other(device: torch.device) -> None:
    o_a, lse_a, o_b, lse_b = states(device, (3, 2, 16))
    lse_a += 500
    out, lse = merged([o_a, lse_a, o_b, lse_b])
    assert_same_bits(out, o_a)
    assert_same_bits(lse.contiguous(), lse_a.contiguous())


@pytest.mark.parametrize("which", ["a", "b"])
def test_results_may_take_the_place_of_a_state(which: str, device: torch.device) -> None:
    # Heads of 192: their threads are of two warps.
    o_a, lse_a, o_b, lse_b = states(device, (50, 6, 192), torch.float16)
    expected = ops.merge_states(o_a, lse_a, o_b, lse_b)
    out, lse = (o_a, lse_a) if which == "a" else (o_b, lse_b)
    for got, want in zip(
        ops.merge_states(o_a, lse_a, o_b, lse_b, out=out, out_lse=lse), expected, strict=True
    ):
        assert_same_bits(got, want)


def test_a_head_does_not_notice_the_others(device: torch.device) -> None:
    arguments = states(device, (9, 5, 40), torch.bfloat16)
    whole = ops.merge_states(*arguments)
    for part in (slice(0, 1), slice(3, 7)):
        for got, want in zip(ops.merge_states(*(x[part] for x in arguments)), whole, strict=True):
            assert_same_bits(got, want[part])
        by_head = ops.merge_states(*(x[:, part] for x in arguments))
        for got, want in zip(by_head, whole, strict=True):
            assert_same_bits(got, want[:, part])


def test_no_tokens(device: torch.device) -> None:
    out, lse = ops.merge_states(*states(device, (0, 3, 16)))
    assert (out.shape, lse.shape) == ((0, 3, 16), (0, 3))


def cascade(device: torch.device, dtype: torch.dtype, dim: int, prefix: int) -> None:
    """Queries of five texts that begin alike: once each with all keys, and as a cascade."""
    heads_q, heads_kv, suffixes = 6, 2, (3, 1, 70, 9, 130)
    common = [torch.randn(prefix, heads_kv, dim).to(dtype).to(device) for _ in "kv"]
    own = [torch.randn(sum(suffixes), heads_kv, dim).to(dtype).to(device) for _ in "kv"]
    q = torch.randn(sum(suffixes), heads_q, dim).to(dtype).to(device)
    begins = [sum(suffixes[:b]) for b in range(len(suffixes) + 1)]
    cu_own = int32(begins, device)
    longest = max(suffixes)
    # All queries see the whole prefix, as one sequence.
    above = ops.varlen_attention(
        *(q, *common, int32([0, len(q)], device), int32([0, prefix], device), len(q), prefix),
        causal=False,
        return_lse=True,
    )
    below = ops.varlen_attention(q, *own, cu_own, cu_own, longest, longest, return_lse=True)
    out, lse = ops.merge_states(*above, *below)

    whole = [
        torch.cat([torch.cat([x, y[begins[b] : begins[b + 1]]]) for b in range(len(suffixes))])
        for x, y in zip(common, own, strict=True)
    ]
    cu_all = int32([begin + b * prefix for b, begin in enumerate(begins)], device)

    def twin(precision: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        return reference.varlen_attention(q, *whole, cu_own, cu_all, dtype=precision)

    exact, exact_lse = twin(torch.float64)
    torchs = (twin(dtype)[0].double() - exact).abs()
    error = (out.double() - exact).abs()
    assert error.square().mean().sqrt() <= 2 * torchs.square().mean().sqrt() + 1e-6
    assert error.amax() <= 2 * torchs.amax() + 1e-6
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_cascade_is_the_attention_to_all_keys(dtype: torch.dtype, device: torch.device) -> None:
    cascade(device, dtype, dim=64 if device.type == "cuda" else 16, prefix=300)


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [128, 256])
def test_a_cascade_of_long_heads(dim: int) -> None:
    cascade(torch.device("cuda"), torch.bfloat16, dim, prefix=1000)


@pytest.mark.gpu
def test_states_beyond_two_to_the_31_elements() -> None:
    tokens, heads, dim = 2**31 // (8 * 128) + 3, 8, 128
    device = torch.device("cuda")
    o_a, o_b = (torch.empty(tokens, heads, dim, dtype=torch.bfloat16, device=device) for _ in "ab")
    lse_a, lse_b = (torch.zeros(tokens, heads, device=device) for _ in "ab")
    ends = [0, 1, tokens - 2, tokens - 1]
    for o, lse in ((o_a, lse_a), (o_b, lse_b)):
        o[ends] = torch.randn(4, heads, dim, device=device).bfloat16()
        lse[ends] = torch.randn(4, heads, device=device)
    few = ops.merge_states(o_a[ends], lse_a[ends], o_b[ends], lse_b[ends])
    many = ops.merge_states(o_a, lse_a, o_b, lse_b, out=o_a)
    for got, want in zip(many, few, strict=True):
        assert_same_bits(got[ends], want)


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"o_a": torch.zeros(2, 3, 4, dtype=torch.int8)}, TypeError, "o_a: got dtype torch.int8"),
        ({"o_a": torch.zeros(2, 12)}, ValueError, r"o_a: got shape \[2, 12\], expected"),
        ({"o_a": torch.zeros(2, 3, 0)}, ValueError, "o_a: got dim = 0, expected at least 1"),
        (
            {"o_a": torch.zeros(1, 1, 4).expand(2**16, 2**16, 4)},
            ValueError,
            "o_a: got 65536 tokens of 65536 heads, expected at most 4294967295 together",
        ),
        ({"o_b": torch.zeros(2, 3, 4).half()}, TypeError, "o_b: got dtype torch.float16"),
        ({"o_b": torch.zeros(2, 3, 5)}, ValueError, r"o_b: got shape \[2, 3, 5\], expected"),
        ({"lse_a": torch.zeros(3, 2)}, ValueError, r"lse_a: got shape \[3, 2\], expected \[2, 3\]"),
        ({"lse_b": torch.zeros(2, 3).double()}, TypeError, "lse_b: got dtype torch.float64"),
        ({"lse_b": None}, TypeError, "lse_b: got NoneType, expected a tensor"),
        ({"out": torch.zeros(2, 3, 4).half()}, TypeError, "out: got dtype torch.float16"),
        ({"out": torch.zeros(2, 1, 4).expand(2, 3, 4)}, ValueError, "out: got strides"),
        ({"out_lse": torch.zeros(2, 1).expand(2, 3)}, ValueError, "out_lse: got strides"),
        ({"stream": 0}, ValueError, "stream: got 0, expected None"),
    ],
    ids=str,
)
def test_bad_input_is_named(changes: dict[str, Any], error: type, match: str) -> None:
    names = ("o_a", "lse_a", "o_b", "lse_b")
    arguments = dict(zip(names, states(torch.device("cpu"), (2, 3, 4)), strict=True))
    with pytest.raises(error, match=match):
        ops.merge_states(**{**arguments, **changes})
