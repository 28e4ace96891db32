"""Decode attention by our kernel: accuracy over its whole grid, one graph for many lengths."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from ops_cases import PagedCase, assert_same_bits, int32

from ostinato import ops
from ostinato.ops import reference
from ostinato.ops.attention import decode_cuda

pytestmark = [pytest.mark.gpu, pytest.mark.nvcc]

CUDA = torch.device("cuda")
EDGES = (1, 0, 15, 16, 17, 63, 64, 65, 0, 300, 2049)
Args = tuple[torch.Tensor, ...]


def attend(args: Args, options: dict[str, Any], **more: Any) -> Any:
    """Call the op after seeing that our kernel serves it."""
    q, k_cache, v_cache, page_table, _ = args
    queries = min(options["max_seqlen_q"], q.size(0))
    invariant = options.get("batch_invariant", False)
    kernel = decode_cuda.variant(
        q, k_cache, v_cache, page_table, queries, invariant, torch.empty_like(q)
    )
    assert kernel is not None
    return ops.paged_attention(*args, **options, **more)


def check(case: PagedCase, **more: Any) -> None:
    args, options = case.build(CUDA)
    out, lse = attend(args, {**options, **more}, return_lse=True)
    exact, exact_lse = reference.paged_attention(*args, **options, dtype=torch.float64)
    torchs, _ = reference.paged_attention(*args, **options, dtype=case.dtype)
    error = (out.double() - exact).abs().amax()
    assert error <= 2 * (torchs.double() - exact).abs().amax() + 1e-6
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("page_size", [16, 64, 48, 1, 7])
@pytest.mark.parametrize("dim", [16, 48, 64, 80, 96, 128, 192, 256])
def test_dims_pages_and_dtypes(dim: int, page_size: int, dtype: torch.dtype) -> None:
    check(PagedCase(EDGES, heads_q=8, dim=dim, page_size=page_size, dtype=dtype))


@pytest.mark.parametrize(
    ("heads", "queries"),
    [
        *(((q, kv), 1) for q, kv in [(1, 1), (3, 1), (6, 2), (32, 8), (64, 8), (64, 1), (5, 5)]),
        *(((8, 2), queries) for queries in (2, 3, 4, 8, 16)),
        *(((3, 1), 5), ((32, 8), 16), ((16, 1), 4)),
    ],
    ids=str,
)
def test_groups_and_queries(heads: tuple[int, int], queries: int) -> None:
    lengths = tuple(max(length, queries) if length else 0 for length in EDGES)
    check(
        PagedCase(
            lengths,
            max_seqlen_q=queries,
            q_lens=tuple(min(queries, length) for length in lengths),
            heads_q=heads[0],
            heads_kv=heads[1],
            dim=128,
            page_size=16,
            dtype=torch.bfloat16,
        )
    )


@pytest.mark.parametrize("layout", ["dense", "heads first"])
@pytest.mark.parametrize(
    "rule",
    [
        *({"scale": 0.3}, {"softcap": 2.0}, {"sinks": True}, {"causal": False}),
        {"softcap": 1e6},
        *({"window": window} for window in [(0, 0), (3, -1), (100, -1), (5000, -1), (-1, 2)]),
        {"window": (40, 1), "causal": False, "softcap": 1.5, "sinks": True},
    ],
    ids=str,
)
def test_rules_and_layouts(rule: dict[str, Any], layout: str) -> None:
    lengths = tuple(max(length, 3) if length else 0 for length in EDGES)
    queries = tuple(min(3, length) for length in lengths)
    check(
        PagedCase(
            lengths,
            q_lens=queries,
            max_seqlen_q=3,
            dim=64,
            page_size=16,
            dtype=torch.bfloat16,
            layout=layout,
            **rule,
        )
    )


# Query and KV heads of Gemma 1, 2 and 3, whose heads are of 256, and a cap with a window.
GEMMA_HEADS = [(4, 1), (8, 1), (8, 4), (16, 8), (16, 16)]
GEMMA_RULES: list[dict[str, Any]] = [
    {"softcap": 50.0, "scale": 1 / 16},
    {"softcap": 2.0, "window": (511, 0)},
    {"window": (63, 0), "scale": 168**-0.5},
]


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("rule", GEMMA_RULES, ids=str)
@pytest.mark.parametrize("heads", GEMMA_HEADS, ids=str)
def test_heads_of_256_with_caps_and_windows(
    heads: tuple[int, int], rule: dict[str, Any], batch_invariant: bool
) -> None:
    for page_size in (16, 7):
        case = PagedCase(
            EDGES,
            heads_q=heads[0],
            heads_kv=heads[1],
            dim=256,
            page_size=page_size,
            dtype=torch.bfloat16,
            **rule,
        )
        check(case, batch_invariant=batch_invariant)


def test_a_head_that_was_expanded_and_one_page() -> None:
    """A dimension of one element may have any stride, 0 as well."""
    torch.manual_seed(0)
    q = torch.randn(2, 4, 64, device="cuda", dtype=torch.bfloat16)
    rows = torch.randn(16, 64, device="cuda", dtype=torch.bfloat16)
    plain = rows.view(1, 16, 1, 64)
    odd = rows.as_strided((1, 16, 1, 64), (0, 64, 0, 1))
    table = torch.zeros(2, 1, device="cuda", dtype=torch.int32)
    lens = torch.tensor([16, 5], device="cuda", dtype=torch.int32)
    for cache in (odd, rows.as_strided((1, 16, 1, 64), (8, 64, 16, 1))):
        got = ops.paged_attention(q, cache, cache, table, lens)
        assert torch.equal(got, ops.paged_attention(q, plain, plain, table, lens))


@pytest.mark.parametrize("scale_kind", ["scalar", "one", "head", "token"])
@pytest.mark.parametrize("cache_dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("page_size", [16, 7])
def test_8_bit_caches(dim: int, page_size: int, cache_dtype: torch.dtype, scale_kind: str) -> None:
    check(
        PagedCase(
            EDGES,
            heads_q=8,
            dim=dim,
            page_size=page_size,
            dtype=torch.bfloat16,
            cache_dtype=cache_dtype,
            scale_kind=scale_kind,
        )
    )


@pytest.mark.parametrize("batch", [1, 2, 31, 33, 200, 512, 1500])
@pytest.mark.parametrize("longest", [64, 1000, 20_000])
def test_batches_and_shares(batch: int, longest: int) -> None:
    if batch * longest > 800_000:
        longest = 800_000 // batch
    ragged = tuple((i * 7919) % (longest + 1) for i in range(batch))
    for lengths in ((longest,) * batch, (*ragged[:-1], longest)):
        check(PagedCase(lengths, heads_q=8, dim=64, page_size=16, dtype=torch.bfloat16))


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("lengths", [(300,) * 200, (500, 0, 200) * 80], ids=["alike", "ragged"])
def test_many_sequences_whose_segments_are_claimed(
    lengths: tuple[int, ...], batch_invariant: bool
) -> None:
    case = PagedCase(lengths, heads_q=32, heads_kv=8, dim=128, page_size=16, dtype=torch.bfloat16)
    args, options = case.build(CUDA)
    exact, _ = reference.paged_attention(*args, **options, dtype=torch.float64)
    options["batch_invariant"] = batch_invariant
    whole = attend(args, options)
    torch.testing.assert_close(whole.double(), exact, rtol=2e-2, atol=2e-3)
    for _ in range(100):
        assert_same_bits(attend(args, options), whole)
    if batch_invariant:
        q, k_cache, v_cache, table, lens = args
        some = list(range(0, len(lengths), 7))
        part = attend((q[some], k_cache, v_cache, table[some], lens[some]), options)
        assert_same_bits(part, whole[some])


@pytest.mark.parametrize("heads", [(32, 8), (4, 1)], ids=str)
def test_batch_invariant_rows_do_not_depend_on_other_sequences(heads: tuple[int, int]) -> None:
    case = PagedCase(
        (5000, 17, 0, 900, *(300,) * 40),
        heads_q=heads[0],
        heads_kv=heads[1],
        dim=128,
        page_size=16,
        dtype=torch.bfloat16,
    )
    (q, k_cache, v_cache, table, lens), options = case.build(CUDA)
    options["batch_invariant"] = True
    whole = attend((q, k_cache, v_cache, table, lens), options)
    for some in ([0], [1], [3], [0, 2, 43], list(range(1, 44))):
        part = attend((q[some], k_cache, v_cache, table[some], lens[some]), options)
        assert_same_bits(part, whole[some])


@pytest.mark.parametrize(
    "rule",
    [
        *({}, {"window": (700, -1)}, {"softcap": 3.0}, {"sinks": True}),
        *({"max_seqlen_q": 2}, {"max_seqlen_q": 2, "window": (90, -1)}),
        *({"cache_dtype": torch.int8}, {"cache_dtype": torch.float8_e4m3fn, "scale_kind": "token"}),
        {"cache_dtype": torch.float8_e4m3fn, "max_seqlen_q": 2, "window": (90, -1)},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("heads", "dtype", "dim"),
    [
        *(((32, 8), torch.bfloat16, 128), ((4, 1), torch.bfloat16, 128)),
        *(((8, 2), torch.float16, 128), ((8, 2), torch.bfloat16, 96)),
    ],
    ids=str,
)
def test_neither_the_batch_nor_the_room_in_the_page_table_changes_a_bit(
    heads: tuple[int, int], dtype: torch.dtype, dim: int, rule: dict[str, Any]
) -> None:
    """Launches of few sequences take a kernel of clusters."""
    lengths = (1500, 17, 2, 700, 1024, 3000)
    case = PagedCase(
        lengths * 24,
        heads_q=heads[0],
        heads_kv=heads[1],
        dim=dim,
        page_size=16,
        dtype=dtype,
        **rule,
    )
    (q, k_cache, v_cache, table, lens), options = case.build(CUDA)
    options["batch_invariant"] = True
    whole = attend((q, k_cache, v_cache, table, lens), options)
    wide = torch.cat([table, table.new_zeros(table.size(0), 3000)], dim=1)
    kernels = set()
    for count in (1, 2, 3, 6, 16, 20, 144):
        for each in (table, wide):
            rows = count * options["max_seqlen_q"]
            some = (q[:rows], k_cache, v_cache, each[:count], lens[:count])
            kernel = decode_cuda.variant(
                *some[:4], options["max_seqlen_q"], True, torch.empty_like(q)
            )
            assert kernel is not None
            kernels.add(kernel.cluster)
            assert_same_bits(attend(some, options), whole[:rows])
    assert kernels == {1, 4}


@pytest.mark.parametrize(
    "more",
    [
        *({}, {"window": (100, -1)}, {"softcap": 2.0}, {"sinks": True}),
        *({"cache_dtype": torch.int8}, {"cache_dtype": torch.float8_e4m3fn, "scale_kind": "token"}),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("dim", "heads", "page_size"), [(64, (8, 2), 16), (128, (16, 1), 32), (80, (6, 2), 64)], ids=str
)
@pytest.mark.parametrize("lengths", [(700,), (1,), (64, 0), (513, 1000), (3000,)], ids=str)
def test_few_short_sequences(
    lengths: tuple[int, ...],
    dim: int,
    heads: tuple[int, int],
    page_size: int,
    more: dict[str, Any],
) -> None:
    case = PagedCase(
        lengths,
        heads_q=heads[0],
        heads_kv=heads[1],
        dim=dim,
        page_size=page_size,
        dtype=torch.bfloat16,
        **more,
    )
    tokens = case.build(CUDA)[0][3].size(1) * page_size
    assert len(lengths) * heads[1] * tokens <= 16384, "too many for the kernel of few"
    check(case)


@pytest.mark.parametrize("queries", [1, 2])
@pytest.mark.parametrize("rule", [{}, {"window": (1500, -1)}, {"sinks": True}], ids=str)
def test_splits_of_a_fixed_size_are_exact(rule: dict[str, Any], queries: int) -> None:
    case = PagedCase(
        (1023, 1024, 1025, 2048, 2049, 9000, 64),
        max_seqlen_q=queries,
        heads_q=8,
        heads_kv=2,
        dim=128,
        page_size=16,
        dtype=torch.bfloat16,
        **rule,
    )
    args, options = case.build(CUDA)
    out, lse = attend(args, {**options, "batch_invariant": True}, return_lse=True)
    exact, exact_lse = reference.paged_attention(*args, **options, dtype=torch.float64)
    torchs, _ = reference.paged_attention(*args, **options, dtype=case.dtype)
    error = (out.double() - exact).abs().amax()
    assert error <= 2 * (torchs.double() - exact).abs().amax() + 1e-6
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("groups", [1, 4, 16])
def test_a_value_that_one_query_sees_reaches_no_other(groups: int, poison: float) -> None:
    length, queries, page = 50, 4, 16
    case = PagedCase(
        (length,),
        max_seqlen_q=queries,
        heads_q=groups,
        heads_kv=1,
        dim=128,
        page_size=page,
        dtype=torch.bfloat16,
    )
    args, options = case.build(CUDA)
    v_cache, table = args[2], args[3]
    clean = attend(args, options)
    for position in range(length - queries, length):
        at = (table[0, position // page].long(), position % page, 0, 77)
        kept = v_cache[at].clone()
        v_cache[at] = poison
        out = attend(args, options)
        v_cache[at] = kept
        sees = torch.arange(queries, device=CUDA) >= position - (length - queries)
        expected = clean.clone()
        expected[sees, :, 77] = poison
        torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)


def test_a_thousand_repeats_give_the_same_bits() -> None:
    case = PagedCase(
        (5000, 17, 0, 900), heads_q=32, heads_kv=8, dim=128, page_size=16, dtype=torch.bfloat16
    )
    args, options = case.build(CUDA)
    expected = attend(args, options)
    out = torch.empty_like(expected)
    for _ in range(1000):
        out.fill_(torch.nan)
        attend(args, options, out=out)
        assert_same_bits(out, expected)


@pytest.mark.parametrize(
    "lengths",
    [(17_000,) * 34, (40_000, 0, *range(9_000, 15_000, 100)), (20_000,) * 30 + (16_000,) * 4],
    ids=["alike", "ragged", "nearly alike"],
)
def test_long_shares_whose_warps_wait_for_each_other(lengths: tuple[int, ...]) -> None:
    case = PagedCase(lengths, heads_q=8, dim=128, page_size=16, dtype=torch.bfloat16)
    check(case)
    args, options = case.build(CUDA)
    workspace = torch.zeros(16 << 20, dtype=torch.uint8, device=CUDA)
    expected = attend(args, options, workspace=workspace)
    out = torch.empty_like(expected)
    for _ in range(100):
        out.fill_(torch.nan)
        attend(args, options, out=out, workspace=workspace)
        assert_same_bits(out, expected)
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    assert not workspace[: 32 * sms + 8].any()  # the counters


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_one_graph_serves_hundreds_of_length_vectors(batch_invariant: bool) -> None:
    batch, most, page = 12, 2500, 16
    case = PagedCase((most,) * batch, heads_q=8, dim=128, page_size=page, dtype=torch.bfloat16)
    args, options = case.build(CUDA)
    options["batch_invariant"] = batch_invariant
    seq_lens = args[4]
    out = torch.empty_like(args[0])
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        attend(args, options, out=out)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            attend(args, options, out=out)
        vectors = [[0] * batch, [most] * batch, [most, *[1] * (batch - 1)], [0, most] * 6]
        vectors += torch.randint(0, most + 1, (300, batch)).tolist()
        for lengths in vectors:
            seq_lens.copy_(int32(lengths, CUDA))
            out.fill_(torch.nan)
            graph.replay()
            assert_same_bits(out, attend(args, options))


def test_zero_queries_and_keys_give_the_mean_of_the_values() -> None:
    case = PagedCase((1, 64, 777), heads_q=8, dim=128, page_size=16, dtype=torch.bfloat16)
    args, options = case.build(CUDA)
    q, k_cache, v_cache, table, _ = args
    q.zero_()
    k_cache.nan_to_num_(0).zero_()
    v_cache.fill_(torch.nan)
    ones = [0.5, 0.25, 2.0]
    for row, (length, value) in enumerate(zip(case.k_lens, ones, strict=True)):
        for position in range(length):
            v_cache[table[row, position // 16].long(), position % 16] = value
    expected = torch.tensor(ones, device=CUDA)[:, None, None].expand_as(q)
    torch.testing.assert_close(attend(args, options).float(), expected, rtol=0, atol=0)


def test_a_workspace_is_used_and_may_not_be_too_small() -> None:
    case = PagedCase((5000,), heads_q=8, dim=128, page_size=16, dtype=torch.bfloat16)
    args, options = case.build(CUDA)
    expected = attend(args, options)
    with pytest.raises(ValueError, match="workspace: got 64 bytes, expected at least"):
        attend(args, options, workspace=torch.zeros(64, dtype=torch.uint8, device=CUDA))
    large = torch.zeros(64 << 20, dtype=torch.uint8, device=CUDA)
    for _ in range(3):
        assert_same_bits(attend(args, options, workspace=large), expected)


def test_kernels_of_all_kinds_share_a_workspace() -> None:
    cases = [
        PagedCase((length,), heads_q=8, dim=dim, page_size=16, dtype=torch.bfloat16)
        for dim, length in ((256, 9000), (128, 7000), (64, 5000), (192, 8000))
    ]
    built = [case.build(CUDA) for case in cases]
    workspace = torch.zeros(64 << 20, dtype=torch.uint8, device=CUDA)
    expected = [
        attend(args, options, workspace=torch.zeros_like(workspace)) for args, options in built
    ]
    for _ in range(5):
        for (args, options), wanted in zip(built, expected, strict=True):
            assert_same_bits(attend(args, options, workspace=workspace), wanted)


def test_caches_beyond_two_to_the_31_elements() -> None:
    pages, page, heads, dim = 2**31 // (16 * 8 * 128) + 3, 16, 8, 128
    k_cache, v_cache = (
        torch.empty(pages, page, heads, dim, dtype=torch.bfloat16, device=CUDA) for _ in "kv"
    )
    ids = [pages - 1, 0, pages - 2]
    for cache, p in product((k_cache, v_cache), ids):
        cache[p] = torch.randn(page, heads, dim, device=CUDA)
    q = torch.randn(1, 8, dim, dtype=torch.bfloat16, device=CUDA)
    table = int32(ids, CUDA)[None]
    args = (q, k_cache, v_cache, table, int32([41], CUDA))
    small = (q, k_cache[ids], v_cache[ids], int32([0, 1, 2], CUDA)[None], args[4])
    assert_same_bits(ops.paged_attention(*args), ops.paged_attention(*small))
