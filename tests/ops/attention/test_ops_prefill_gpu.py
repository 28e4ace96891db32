"""Prefill attention by our kernel: accuracy over its whole grid, one graph for many lengths."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise, product
from typing import Any

import pytest
import torch
from ops_cases import PagedCase, assert_same_bits, int32, packed
from prefill_checks import check

from ostinato import ops
from ostinato.ops import reference
from ostinato.ops.attention import decode_cuda, prefill_cuda

pytestmark = [pytest.mark.gpu, pytest.mark.nvcc]

CUDA = torch.device("cuda")
BF16, FP16 = torch.bfloat16, torch.float16
# Around the tiles of queries and keys.
Q_LENS = (0, 1, 5, 63, 64, 65, 127, 128, 129, 0, 200)
K_LENS = (7, 0, 300, 64, 65, 64, 128, 127, 500, 9, 201)
RULES: list[dict[str, Any]] = [
    *(
        {"scale": 0.3},
        {"scale": -0.1},
        {"softcap": 5.0},
        {"softcap": 1e6},
        {"sinks": True},
        {"causal": False},
    ),
    *({"window": window} for window in [(0, 0), (30, -1), (130, -1), (5000, -1), (-1, 2)]),
    {"window": (50, 40), "causal": False, "softcap": 15.0, "sinks": True},
]


def attend(args: list[Any], **options: Any) -> Any:
    """Call the op after seeing that our kernel serves it."""
    q, k, v = args[:3]
    out = q.new_empty(*q.shape[:2], v.size(2))
    assert prefill_cuda.packed_variant(q, k, v, out) is not None
    return ops.varlen_attention(*args, **options)


@pytest.fixture(params=["tiles of 128", "tiles of 192"])
def tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of keys with head dims of 128, packed or in pages, whose kernels are two."""
    larger = request.param == "tiles of 192"
    monkeypatch.setattr(prefill_cuda, "prefers_many_rows", lambda *_: larger)


def check_packed(args: list[Any], **options: Any) -> None:
    out, lse = attend(args, **options, return_lse=True)

    def twin(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        return reference.varlen_attention(*args[:5], **options, dtype=dtype)

    check(out, lse, twin, args[0].dtype)


def check_paged(case: PagedCase) -> None:
    args, options = case.build(CUDA)
    q, k_cache, v_cache, table, _ = args
    queries = options["max_seqlen_q"]
    out = q.new_empty(*q.shape[:2], v_cache.size(3))
    assert decode_cuda.variant(q, k_cache, v_cache, table, queries, False, out) is None
    assert prefill_cuda.paged_variant(q, k_cache, v_cache, table, out) is not None
    out, lse = ops.paged_attention(*args, **options, return_lse=True)

    def twin(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        return reference.paged_attention(*args, **options, dtype=dtype)

    check(out, lse, twin, case.dtype)


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("k_lens", [None, K_LENS], ids=["all", "chunks"])
def test_dims_and_dtypes(k_lens: tuple[int, ...] | None, dim: int, dtype: torch.dtype) -> None:
    check_packed(packed(Q_LENS, k_lens, dim=dim, dtype=dtype))


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("heads", [(1, 1), (3, 1), (6, 2), (32, 8), (8, 8), (12, 1)], ids=str)
@pytest.mark.parametrize("q_lens", [(300, 20, 1), (40, 9)], ids=str)
def test_groups(q_lens: tuple[int, ...], heads: tuple[int, int]) -> None:
    check_packed(packed(q_lens, heads=heads))


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_rules(rule: dict[str, Any]) -> None:
    rule = dict(rule)
    if rule.pop("sinks", False):
        rule["sinks"] = torch.randn(4, device=CUDA)
    check_packed(packed((300, 129, 64), (310, 500, 64)), **rule)


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("scale", [0.8, 3.0, -5.0, 50.0])
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_scores_far_above_all_before(dtype: torch.dtype, scale: float) -> None:
    """Weights overflow relative to the maximum so far, which is not looked for in every tile."""
    check_packed(packed((300, 70), (900, 400), dtype=dtype), scale=scale)


@pytest.mark.usefixtures("tiles")
def test_long_sequences_beside_short_ones() -> None:
    check_packed(packed((2048, 1, 777, 0, 3000, 64), heads=(8, 2)))


@pytest.mark.usefixtures("tiles")
def test_more_sequences_than_one_launch_takes() -> None:
    check_packed(packed(tuple(b * 7 % 90 for b in range(700)), heads=(2, 1)))


@pytest.mark.parametrize(
    ("dim", "value_dim", "dtype"),
    # DeepSeek's; then others' tiles, and outputs larger than their queries.
    [(192, 128, BF16), (192, 128, FP16), (96, 64, BF16), (64, 128, BF16)],
)
@pytest.mark.parametrize("k_lens", [None, K_LENS], ids=["all", "chunks"])
def test_values_of_another_dim(
    k_lens: tuple[int, ...] | None, dim: int, value_dim: int, dtype: torch.dtype
) -> None:
    check_packed(packed(Q_LENS, k_lens, dim=dim, value_dim=value_dim, dtype=dtype))


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_rules_with_values_of_another_dim(rule: dict[str, Any], dtype: torch.dtype) -> None:
    rule = dict(rule)
    if rule.pop("sinks", False):
        rule["sinks"] = torch.randn(4, device=CUDA)
    lens = ((300, 129, 64), (310, 500, 64))
    check_packed(packed(*lens, dim=192, value_dim=128, dtype=dtype), **rule)


@pytest.mark.parametrize("heads", [(1, 1), (6, 2), (16, 16), (12, 1)], ids=str)
@pytest.mark.parametrize("q_lens", [(300, 20, 1), (40, 9)], ids=str)
def test_groups_with_values_of_another_dim(q_lens: tuple[int, ...], heads: tuple[int, int]) -> None:
    check_packed(packed(q_lens, heads=heads, dim=192, value_dim=128))


@pytest.mark.parametrize("scale", [3.0, 50.0])
def test_scores_far_above_all_before_with_values_of_another_dim(scale: float) -> None:
    check_packed(packed((300, 70), (900, 400), dim=192, value_dim=128), scale=scale)


@pytest.mark.parametrize("where", ["k", "v"])
def test_nan_with_values_of_another_dim_reaches_only_those_that_see_it(where: str) -> None:
    args = packed((200, 100), (330, 100), heads=(2, 1), dim=192, value_dim=128)
    expected = attend(args)
    args[1 if where == "k" else 2][270] = math.nan
    out = attend(args)
    assert not out[140:200].isfinite().any()
    torch.testing.assert_close(out[:140], expected[:140], rtol=2e-2, atol=2e-2)
    assert_same_bits(out[200:], expected[200:])


def test_only_the_output_of_values_of_another_dim_is_written() -> None:
    """Neighbours of a strided output, and rows of no sequence, stay as they are."""
    args = packed((129, 70), dim=192, value_dim=128)
    expected = attend(args)
    args[0] = torch.cat([args[0], args[0][:2]])
    wide = torch.full((201, 8, 136), math.nan, dtype=BF16, device=CUDA)
    out = wide[:, 2:6, :128]
    attend(args, out=out)
    assert_same_bits(out[:199], expected)
    wide[:199, 2:6, :128] = math.nan
    assert wide.isnan().all()


@pytest.mark.parametrize("rule", [{}, {"causal": False}, {"window": (90, -1)}], ids=str)
@pytest.mark.parametrize("page_size", [16, 48, 256, 7])
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_pages_with_values_of_another_dim(
    dtype: torch.dtype, page_size: int, rule: dict[str, Any]
) -> None:
    case = PagedCase(K_LENS, q_lens=Q_LENS, max_seqlen_q=200, page_size=page_size, **rule)
    check_paged(replace(case, dim=192, value_dim=128, dtype=dtype))


def test_few_queries_with_values_of_another_dim_are_not_for_the_decode_kernel() -> None:
    check_paged(
        PagedCase((300, 1, 64), max_seqlen_q=1, dim=192, value_dim=128, page_size=16, dtype=BF16)
    )


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("page_size", [16, 48, 64, 256, 1, 7])
@pytest.mark.parametrize("dim", [64, 96, 128, 256])
def test_pages(dim: int, page_size: int) -> None:
    check_paged(
        PagedCase(
            K_LENS,
            q_lens=Q_LENS,
            max_seqlen_q=200,
            dim=dim,
            page_size=page_size,
            dtype=BF16,
        )
    )


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("layout", ["dense", "heads first"])
@pytest.mark.parametrize("page_size", [16, 7])
@pytest.mark.parametrize(
    "rule",
    [*({"causal": False}, {"softcap": 2.0, "sinks": True}), {"window": (90, -1)}],
    ids=str,
)
def test_rules_and_layouts_of_pages(rule: dict[str, Any], page_size: int, layout: str) -> None:
    check_paged(
        PagedCase(
            (700, 300, 0, 70),
            q_lens=(200, 1, 0, 70),
            max_seqlen_q=200,
            dim=128,
            page_size=page_size,
            dtype=BF16,
            layout=layout,
            **rule,
        )
    )


@pytest.mark.parametrize("page_size", [16, 7])
@pytest.mark.parametrize(
    "rule",
    [
        {"softcap": 50.0, "scale": 1 / 16},
        {"softcap": 2.0, "window": (511, 0)},
        {"window": (63, 0), "scale": 168**-0.5},
    ],
    ids=str,
)
@pytest.mark.parametrize("heads", [(4, 1), (8, 4), (16, 16)], ids=str)
def test_heads_of_256_with_caps_and_windows(
    heads: tuple[int, int], rule: dict[str, Any], page_size: int
) -> None:
    """As Gemma has them."""
    check_paged(
        PagedCase(
            (1300, 300, 0, 170),
            q_lens=(200, 65, 0, 170),
            max_seqlen_q=200,
            heads_q=heads[0],
            heads_kv=heads[1],
            dim=256,
            page_size=page_size,
            dtype=BF16,
            **rule,
        )
    )


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("where", ["k", "v", "infinite v"])
def test_nan_reaches_only_those_that_see_it(where: str) -> None:
    args = packed((200, 100), (330, 100), heads=(2, 1))
    expected = attend(args)
    tensor = args[1] if where == "k" else args[2]
    key, first = 270, 270 - (330 - 200)  # of the first sequence; the query that stands there
    tensor[key] = math.inf if where == "infinite v" else math.nan
    out = attend(args)
    assert not out[first:200].isfinite().any()
    torch.testing.assert_close(out[:first], expected[:first], rtol=2e-2, atol=2e-2)
    assert_same_bits(out[200:], expected[200:])


@pytest.mark.usefixtures("tiles")
def test_what_lies_behind_the_last_query_costs_nothing_and_changes_no_bit() -> None:
    """As padding leaves it there: of a tile's rows some are such, with any scores at all."""
    q, *rest = packed((600,), (2000,), heads=(32, 8))
    padded = torch.zeros(1024, *q.shape[1:], dtype=BF16, device=CUDA)
    padded[:600] = q
    out = torch.empty_like(padded)
    rubbish = torch.randn_like(padded[600:])
    expected, fastest = None, math.inf
    for behind in (0.0, 1.0, 1e4, 1e18, 3e38, math.inf, math.nan):
        padded[600:] = rubbish * behind
        attend([padded, *rest], out=out)
        best = math.inf
        # A tile whose scores were all found again would take ten times as long, every time; what
        # other processes on the GPU cost, it costs only at times.
        for _ in range(300):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            attend([padded, *rest], out=out)
            end.record()
            end.synchronize()
            best = min(best, begin.elapsed_time(end))
            if expected is not None and best < 3 * fastest:
                break
        assert best < 3 * fastest
        expected = out[:600].clone() if expected is None else expected
        assert_same_bits(out[:600], expected)
        fastest = min(fastest, best)


@pytest.mark.usefixtures("tiles")
def test_a_thousand_repeats_give_the_same_bits() -> None:
    args = packed((2048, 30, 700, 1300), heads=(16, 4))
    expected = attend(args)
    out = torch.empty_like(expected)
    for _ in range(1000):
        out.fill_(torch.nan)
        attend(args, out=out)
        assert_same_bits(out, expected)


@pytest.mark.usefixtures("tiles")
def test_one_graph_serves_hundreds_of_length_vectors() -> None:
    batch, most = 6, 600
    args = packed((most,) * batch, heads=(8, 2))
    cu_q, cu_k = args[3:5]
    out = torch.empty_like(args[0])
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        attend(args, out=out)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            attend(args, out=out)
        vectors = [[0] * batch, [most] * batch, [most, *[1] * (batch - 1)], [0, most] * 3]
        vectors += torch.randint(0, most + 1, (200, batch)).tolist()
        for lengths in vectors:
            offsets = int32([sum(lengths[:b]) for b in range(batch + 1)], CUDA)
            cu_q.copy_(offsets)
            cu_k.copy_(offsets)
            out.fill_(torch.nan)
            graph.replay()
            assert not out[: sum(lengths)].isnan().any()
            assert out[sum(lengths) :].isnan().all()
            assert_same_bits(out, attend(args, out=torch.full_like(out, torch.nan)))


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_heads_of_pages_that_lie_apart(dtype: torch.dtype) -> None:
    """By 256 bytes, and by 16, where pages are gathered."""
    (q, *caches, table, lens), options = PagedCase(
        K_LENS, q_lens=Q_LENS, max_seqlen_q=200, dim=128, page_size=32, dtype=dtype
    ).build(CUDA)
    expected = ops.paged_attention(q, *caches, table, lens, **options)
    for gap, keys in ((128, "pages"), (8, "slots")):
        apart = []
        for cache in caches:
            wide = cache.new_full((*cache.shape[:3], 128 + gap), math.nan)
            wide[..., :128] = cache
            apart.append(wide[..., :128])
        kernel = prefill_cuda.paged_variant(q, *apart, table, torch.empty_like(q), 200, False)
        assert kernel is not None
        assert kernel.keys == keys
        out = ops.paged_attention(q, *apart, table, lens, **options)
        if keys == "pages":
            assert_same_bits(out, expected)
        torch.testing.assert_close(out, expected, rtol=0.02, atol=0.02)


def test_packed_and_paged_keys_give_the_same_bits() -> None:
    case = PagedCase((500, 300), q_lens=(129, 200), max_seqlen_q=200, dim=128, dtype=BF16)
    for page_size in (16, 7):
        paged_case = PagedCase(**{**vars(case), "page_size": page_size})
        (q, k_cache, v_cache, table, lens), options = paged_case.build(CUDA)
        paged = ops.paged_attention(q, k_cache, v_cache, table, lens, **options)
        rows = [
            torch.cat(
                [
                    cache[table[b, : -(-length // page_size)].long()].flatten(0, 1)[:length]
                    for b, length in enumerate(case.k_lens)
                ]
            )
            for cache in (k_cache, v_cache)
        ]
        offsets = int32([0, 500, 800], CUDA)
        varlen = ops.varlen_attention(q, *rows, options["cu_seqlens_q"], offsets, 200, 500)
        assert_same_bits(varlen, paged)


@pytest.mark.parametrize("rule", [{}, {"window": (200, 0)}], ids=str)
@pytest.mark.parametrize("page_size", [16, 7])
@pytest.mark.parametrize(
    ("dim", "value_dim"), [(64, None), (128, None), (192, None), (192, 128), (256, None)]
)
def test_batch_invariant_rows_do_not_depend_on_neighbours_or_chunks(
    dim: int, value_dim: int | None, page_size: int, rule: dict[str, Any]
) -> None:
    """Nor on the capacities; cuts are at multiples of 384 tokens, of 128 where dim is above 64."""
    long, others = 1300, (1, 130, 40, 9)
    case = PagedCase(
        (long, *(length + 90 for length in others)),
        q_lens=(long, *others),
        heads_q=6,
        dim=dim,
        value_dim=value_dim,
        page_size=page_size,
        dtype=BF16,
        **rule,
    )
    (q, k_cache, v_cache, table, lens), options = case.build(CUDA)
    out = q.new_empty(*q.shape[:2], v_cache.size(3))
    assert prefill_cuda.paged_variant(q, k_cache, v_cache, table, out) is not None
    options |= {"batch_invariant": True, "return_lse": True}
    whole = ops.paged_attention(q, k_cache, v_cache, table, lens, **options)
    for cuts in ((0, long), (0, 384, 1152, long), (0, 384, 512, 640, long)):
        if dim == 64 and any(cut % 384 for cut in cuts[:-1]):
            continue
        for begin, end in pairwise(cuts):
            options |= {"max_seqlen_q": end - begin, "cu_seqlens_q": int32([0, end - begin], CUDA)}
            args = (q[begin:end], k_cache, v_cache, table[:1], int32([end], CUDA))
            for part, everything in zip(ops.paged_attention(*args, **options), whole, strict=True):
                assert_same_bits(part, everything[begin:end])


def test_caches_beyond_two_to_the_31_elements() -> None:
    pages, page, heads, dim = 2**31 // (16 * 8 * 128) + 3, 16, 8, 128
    k_cache, v_cache = (torch.empty(pages, page, heads, dim, dtype=BF16, device=CUDA) for _ in "kv")
    ids = [pages - 1, 0, pages - 2, pages - 3, 1]
    for cache, p in product((k_cache, v_cache), ids):
        cache[p] = torch.randn(page, heads, dim, device=CUDA)
    q = torch.randn(70, 8, dim, dtype=BF16, device=CUDA)
    lens = int32([73], CUDA)
    whole = ops.paged_attention(q, k_cache, v_cache, int32(ids, CUDA)[None], lens, max_seqlen_q=70)
    small = (k_cache[ids], v_cache[ids], int32([0, 1, 2, 3, 4], CUDA)[None])
    assert_same_bits(whole, ops.paged_attention(q, *small, lens, max_seqlen_q=70))
