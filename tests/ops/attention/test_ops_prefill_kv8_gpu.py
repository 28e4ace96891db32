"""Prefill attention over 8-bit keys and values by our kernels: accuracy over the whole grid."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from ops_cases import PagedCase, assert_same_bits, dequantized, int32, packed
from prefill_checks import check

from ostinato import ops
from ostinato.ops import reference
from ostinato.ops.attention import decode_cuda, dequantize_kv, prefill_cuda

pytestmark = [pytest.mark.gpu, pytest.mark.nvcc]

CUDA = torch.device("cuda")
BF16, FP16 = torch.bfloat16, torch.float16
INT8, E4M3 = torch.int8, torch.float8_e4m3fn
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
KINDS = ("scalar", "head", "token")
HEADS: dict[str, Any] = {"dim": 128, "page_size": 16, "dtype": BF16}

each_dtype = pytest.mark.parametrize("dtype", [BF16, FP16])
each_cache = pytest.mark.parametrize("cache", [INT8, E4M3], ids=["int8", "e4m3"])
each_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(params=["tiles of 128", "tiles of 192"])
def tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of head dims of 128, whose kernels are two."""
    larger = request.param == "tiles of 192"
    if larger and request.node.callspec.params.get("dim", 128) != 128:
        pytest.skip("there is one kernel")
    monkeypatch.setattr(prefill_cuda, "prefers_many_rows", lambda *_: larger)


def packed_8_bit(
    q_lens: tuple[int, ...],
    k_lens: tuple[int, ...] | None = None,
    *,
    cache: torch.dtype = E4M3,
    kind: str = "head",
    **options: Any,
) -> tuple[list[Any], dict[str, torch.Tensor]]:
    """Return the arguments of `varlen_attention` and the scales.

    Rows that no sequence owns are NaN, or the extreme value of int8, and so are their scales.
    """
    args = packed(q_lens, k_lens, **options)
    total = sum(q_lens if k_lens is None else k_lens)
    heads = args[1].size(1)
    scales = {}
    for i, name in ((1, "k_scale"), (2, "v_scale")):
        numbers = args[i].float() * (40 if cache is INT8 else 1)
        if cache is INT8:
            codes = numbers.nan_to_num(-128).round().clamp(-128, 127).to(INT8)
        else:
            codes = numbers.to(E4M3)
        wide = torch.empty(codes.size(0), 2 * heads, codes.size(2), dtype=cache, device=CUDA)
        args[i] = wide[:, :heads]
        args[i].copy_(codes)
        shape = {"scalar": (), "head": (heads,), "token": (codes.size(0), heads)}[kind]
        scales[name] = (torch.rand(shape, device=CUDA) + 0.5) / (40 if cache is INT8 else 1)
        if kind == "token":
            scales[name][total:] = math.nan
    return args, scales


def attend(args: list[Any], scales: dict[str, torch.Tensor], **options: Any) -> Any:
    """Call the op after seeing that our kernel serves it."""
    q, k, v = args[:3]
    out = q.new_empty((*q.shape[:2], v.size(2)))
    assert dequantize_kv.variant(q, k, v, out, 1, 1, tokens=k.size(0)) is not None
    return ops.varlen_attention(*args, **scales, **options)


def check_packed(args: list[Any], scales: dict[str, torch.Tensor], **options: Any) -> None:
    out = args[0].new_full((*args[0].shape[:2], args[2].size(2)), math.nan)
    out, lse = attend(args, scales, **options, out=out, return_lse=True)

    q, k, v, *offsets = args[:5]
    k, v = (dequantized(x, scales[f"{name}_scale"], q.dtype) for x, name in ((k, "k"), (v, "v")))

    def twin(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        return reference.varlen_attention(q, k, v, *offsets, **options, dtype=dtype)

    check(out, lse, twin, q.dtype)


def check_paged(case: PagedCase, **more: Any) -> None:
    args, options = case.build(CUDA)
    q, k_cache, v_cache, table, _ = args
    queries = options["max_seqlen_q"]
    out = torch.full_like(q, math.nan)
    assert decode_cuda.variant(q, k_cache, v_cache, table, queries, False, out) is None
    capacity = table.numel() * k_cache.size(1)
    chosen = dequantize_kv.variant(
        q, k_cache, v_cache, out, table.size(0), queries, tokens=capacity
    )
    assert chosen is not None
    out, lse = ops.paged_attention(*args, **options, **more, out=out, return_lse=True)
    rest = dict(options)
    k_cache = dequantized(k_cache, rest.pop("k_scale"), q.dtype)
    v_cache = dequantized(v_cache, rest.pop("v_scale"), q.dtype)

    def twin(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        return reference.paged_attention(q, k_cache, v_cache, *args[3:], **rest, dtype=dtype)

    check(out, lse, twin, case.dtype)


@pytest.mark.usefixtures("tiles")
@each_dtype
@each_cache
@each_kind
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("k_lens", [None, K_LENS], ids=["all", "chunks"])
def test_packed_dims_and_dtypes(
    k_lens: tuple[int, ...] | None, dim: int, kind: str, cache: torch.dtype, dtype: torch.dtype
) -> None:
    check_packed(*packed_8_bit(Q_LENS, k_lens, dim=dim, dtype=dtype, cache=cache, kind=kind))


@each_cache
@each_kind
@pytest.mark.parametrize("dims", [(16, 16), (80, 80), (96, 64), (192, 128), (128, 256)], ids=str)
def test_any_dims_that_16_bit_kernels_have(
    dims: tuple[int, int], kind: str, cache: torch.dtype
) -> None:
    args, scales = packed_8_bit(Q_LENS, K_LENS, dim=dims[0], cache=cache, kind=kind)
    others, _ = packed_8_bit(Q_LENS, K_LENS, dim=dims[1], cache=cache, kind=kind)
    args[2] = others[2]
    check_packed(args, scales)


@pytest.mark.usefixtures("tiles")
@each_cache
@each_kind
@pytest.mark.parametrize("heads", [(1, 1), (3, 1), (6, 2), (32, 8), (8, 8), (12, 1)], ids=str)
@pytest.mark.parametrize("q_lens", [(300, 20, 1), (40, 9)], ids=str)
def test_groups(
    q_lens: tuple[int, ...], heads: tuple[int, int], kind: str, cache: torch.dtype
) -> None:
    check_packed(*packed_8_bit(q_lens, heads=heads, cache=cache, kind=kind))


@pytest.mark.usefixtures("tiles")
@each_cache
@each_kind
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_rules(rule: dict[str, Any], kind: str, cache: torch.dtype) -> None:
    rule = dict(rule)
    if rule.pop("sinks", False):
        rule["sinks"] = torch.randn(4, device=CUDA)
    lens = ((300, 129, 64), (310, 500, 64))
    check_packed(*packed_8_bit(*lens, cache=cache, kind=kind), **rule)


@pytest.mark.usefixtures("tiles")
@each_dtype
@each_cache
@each_kind
@pytest.mark.parametrize("scale", [0.8, 3.0, -5.0, 50.0])
def test_scores_far_above_all_before(
    scale: float, kind: str, cache: torch.dtype, dtype: torch.dtype
) -> None:
    """Weights overflow relative to the maximum so far, which is not looked for in every tile."""
    args, scales = packed_8_bit((300, 70), (900, 400), dtype=dtype, cache=cache, kind=kind)
    check_packed(args, scales, scale=scale)


@pytest.mark.usefixtures("tiles")
@each_cache
def test_negative_static_scales(cache: torch.dtype) -> None:
    args, scales = packed_8_bit((300, 70), (900, 400), cache=cache, kind="head")
    check_packed(args, {name: scale.neg() for name, scale in scales.items()})


@pytest.mark.usefixtures("tiles")
@each_cache
@each_kind
def test_long_sequences_beside_short_ones(kind: str, cache: torch.dtype) -> None:
    check_packed(*packed_8_bit((2048, 1, 777, 0, 3000, 64), heads=(8, 2), cache=cache, kind=kind))


@pytest.mark.usefixtures("tiles")
@each_kind
def test_more_sequences_than_one_launch_takes(kind: str) -> None:
    check_packed(*packed_8_bit(tuple(b * 7 % 90 for b in range(700)), heads=(2, 1), kind=kind))


@pytest.mark.usefixtures("tiles")
@each_dtype
@each_cache
@each_kind
@pytest.mark.parametrize("page_size", [16, 48, 64, 256, 1, 7])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_pages(dim: int, page_size: int, kind: str, cache: torch.dtype, dtype: torch.dtype) -> None:
    check_paged(
        PagedCase(
            K_LENS,
            q_lens=Q_LENS,
            max_seqlen_q=200,
            dim=dim,
            page_size=page_size,
            dtype=dtype,
            cache_dtype=cache,
            scale_kind=kind,
        )
    )


@pytest.mark.usefixtures("tiles")
@each_cache
@each_kind
@pytest.mark.parametrize("layout", ["dense", "heads first"])
@pytest.mark.parametrize("page_size", [16, 7])
@pytest.mark.parametrize(
    "rule",
    [*({"causal": False}, {"softcap": 2.0, "sinks": True}), {"window": (90, -1)}],
    ids=str,
)
def test_rules_and_layouts_of_pages(
    rule: dict[str, Any], page_size: int, layout: str, kind: str, cache: torch.dtype
) -> None:
    check_paged(
        PagedCase(
            (700, 300, 0, 70),
            q_lens=(200, 1, 0, 70),
            max_seqlen_q=200,
            dim=128,
            page_size=page_size,
            dtype=BF16,
            cache_dtype=cache,
            scale_kind=kind,
            layout=layout,
            **rule,
        )
    )


def test_a_call_needs_room_for_the_tokens_that_it_sees() -> None:
    """Sequences without queries have none, however long they are."""
    case = PagedCase(
        (700, 300, 900, 70),
        q_lens=(200, 1, 0, 70),
        max_seqlen_q=200,
        **HEADS,
        cache_dtype=E4M3,
    )
    check_paged(case, max_tokens_k=1070, check_bounds=True)


@each_cache
def test_what_has_no_room_is_written_nowhere_else(cache: torch.dtype) -> None:
    case = PagedCase((700, 300), q_lens=(200, 90), max_seqlen_q=200, **HEADS, cache_dtype=cache)
    args, options = case.build(CUDA)
    q, k_cache, _, table, _ = args
    needed = ops.paged_attention_workspace(
        *(BF16, q.size(1), k_cache.size(2), q.size(2)),
        max_batch=2,
        max_pages=table.size(1),
        page_size=k_cache.size(1),
        max_seqlen_q=200,
        max_tokens_k=800,
        kv_dtype=cache,
    )
    memory = torch.zeros(needed + 4096, dtype=torch.uint8, device=CUDA)
    memory[needed:] = 7
    with_room = ops.paged_attention(*args, **options)
    given = {"workspace": memory[:needed], "max_tokens_k": 800}
    out = ops.paged_attention(*args, **options, **given)
    assert_same_bits(out[:200], with_room[:200])
    assert (memory[needed:] == 7).all()


@each_cache
def test_decode_steps_and_prompts_may_share_a_workspace(cache: torch.dtype) -> None:
    steps = PagedCase((3000, 70, 900), **HEADS, cache_dtype=cache)
    prompts = PagedCase(
        (700, 300, 70), q_lens=(200, 90, 70), max_seqlen_q=200, **HEADS, cache_dtype=cache
    )
    calls = [case.build(CUDA) for case in (steps, prompts)]
    (q, k_cache, *_), _ = calls[0]
    needed = ops.paged_attention_workspace(
        *(BF16, q.size(1), k_cache.size(2), q.size(2)),
        max_batch=3,
        max_pages=max(args[3].size(1) for args, _ in calls),
        page_size=k_cache.size(1),
        max_seqlen_q=200,
        kv_dtype=cache,
    )
    expected = [ops.paged_attention(*args, **options) for args, options in calls]
    memory = torch.zeros(needed, dtype=torch.uint8, device=CUDA)
    for _ in range(3):
        for (args, options), result in zip(calls, expected, strict=True):
            assert_same_bits(ops.paged_attention(*args, **options, workspace=memory), result)


@pytest.mark.parametrize(("k_kind", "v_kind"), [("token", "head"), ("scalar", "token")])
def test_kinds_of_scales_may_be_mixed(k_kind: str, v_kind: str) -> None:
    args, scales = packed_8_bit((300, 129), (310, 500), kind=k_kind)
    _, others = packed_8_bit((300, 129), (310, 500), kind=v_kind)
    check_packed(args, {**scales, "v_scale": others["v_scale"]})


def test_scales_may_lie_apart() -> None:
    args, scales = packed_8_bit((300, 129), (310, 500), kind="token")
    expected = attend(args, scales)
    apart = {}
    for name, scale in scales.items():
        wide = scale.new_full((scale.size(0), scale.size(1) + 3), math.nan)
        apart[name] = wide[:, 1 : 1 + scale.size(1)]
        apart[name].copy_(scale)
    assert_same_bits(attend(args, apart), expected)


@pytest.mark.usefixtures("tiles")
@each_dtype
@pytest.mark.parametrize("magnitude", [2.0**-12, 2.0**12], ids=str)
def test_weights_keep_their_precision_whatever_the_scales(
    magnitude: float, dtype: torch.dtype
) -> None:
    """Those of 16 bits would be too small or too large if they were multiplied by the scales."""
    args, scales = packed_8_bit((300, 70), (900, 400), dtype=dtype, cache=INT8, kind="token")
    args[2].clamp_(-1, 1)
    check_packed(args, {**scales, "v_scale": scales["v_scale"] * 40 * magnitude})


@each_cache
@each_kind
@pytest.mark.parametrize("keys", [1, 100, 4096, 131072])
def test_equal_keys_give_exactly_their_value(keys: int, kind: str, cache: torch.dtype) -> None:
    args, scales = packed_8_bit((128,), (keys,), heads=(2, 1), cache=cache, kind=kind)
    q, k, v = args[:3]
    for x, value in ((q, 0), (k, 0), (v, 3)):
        x.copy_(torch.full_like(x, value))
    scales["v_scale"].fill_(0.5)
    out = attend(args, scales, causal=False)
    assert_same_bits(out, torch.full_like(out, 1.5))


@each_dtype
@each_cache
@each_kind
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_every_element_is_dequantised_exactly(
    dim: int, kind: str, cache: torch.dtype, dtype: torch.dtype
) -> None:
    """With one key the output is its value, and LSE the score."""
    sequences = 256
    args, scales = packed_8_bit(
        (1,) * sequences, heads=(1, 1), dim=dim, dtype=dtype, cache=cache, kind=kind
    )
    q, k, v = args[:3]
    codes = torch.arange(256, device=CUDA).to(torch.uint8)
    for x in (k, v):
        for i in range(dim):
            x[:sequences, 0, i].copy_(codes.roll(i).view(cache))
    q.zero_()
    q[torch.arange(sequences), 0, torch.arange(sequences) % dim] = 1
    for scale in scales.values():
        scale.fill_(1.0)
    out, lse = attend(args, scales, scale=1.0, return_lse=True)
    expected = v[:sequences].float()
    if cache is E4M3:
        seen = k[:sequences].float().isnan().any(2, keepdim=True)
        expected = expected.masked_fill(seen, math.nan)
    finite = ~expected.isnan()
    assert torch.equal(out.isnan(), ~finite)
    assert torch.equal(out.float()[finite], expected[finite])
    scores = k[:sequences, 0].float()[torch.arange(sequences), torch.arange(sequences) % dim]
    clean = ~k[:sequences, 0].float().isnan().any(1)
    torch.testing.assert_close(lse[clean, 0], scores[clean], rtol=1e-6, atol=1e-6)


@pytest.mark.usefixtures("tiles")
@each_cache
@pytest.mark.parametrize("magnitude", [2.0**-100, 2.0**-20, 2.0**20, 2.0**100], ids=str)
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_queries_of_any_magnitude(dim: int, magnitude: float, cache: torch.dtype) -> None:
    """So are keys with scales of any magnitude; rows differ in theirs."""
    args, scales = packed_8_bit((300, 70), (900, 400), dim=dim, cache=cache)
    q = args[0]
    q[::3] *= magnitude
    k_scale = scales["k_scale"]
    out, lse = attend(args, scales, scale=dim**-0.5, return_lse=True)
    args[0] = q.clone()
    args[0][::3] /= magnitude
    scales["k_scale"] = k_scale * magnitude
    expected, expected_lse = attend(args, scales, scale=dim**-0.5, return_lse=True)
    assert_same_bits(out[::3], expected[::3])
    assert_same_bits(lse[::3], expected_lse[::3])


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("where", ["k", "v"])
@each_kind
def test_nan_reaches_only_those_that_see_it(kind: str, where: str) -> None:
    args, scales = packed_8_bit((200, 100), (330, 100), heads=(2, 1), kind=kind)
    expected = attend(args, scales)
    key, first = 270, 270 - (330 - 200)  # of the first sequence; the query that stands there
    tensor = args[1 if where == "k" else 2]
    tensor[key] = torch.full_like(tensor[key], math.nan)
    out = attend(args, scales)
    assert not out[first:200].isfinite().any()
    torch.testing.assert_close(out[:first], expected[:first], rtol=2e-2, atol=2e-2)
    assert_same_bits(out[200:], expected[200:])


@each_cache
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("where", ["k_scale", "v_scale"])
def test_scales_that_are_no_numbers_reach_only_those_that_see_them(
    where: str, value: float, cache: torch.dtype
) -> None:
    args, scales = packed_8_bit((200, 100), (330, 100), heads=(2, 1), cache=cache, kind="token")
    expected = attend(args, scales)
    key, first = 270, 270 - (330 - 200)
    scales[where][key] = value
    out, lse = attend(args, scales, return_lse=True)
    assert not out[first:200].isfinite().all(2).any()
    torch.testing.assert_close(out[:first], expected[:first], rtol=2e-2, atol=2e-2)
    assert_same_bits(out[200:], expected[200:])
    assert lse[:first].isfinite().all()
    if where == "v_scale":
        assert lse.isfinite().all()


@pytest.mark.usefixtures("tiles")
@each_cache
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("page_size", [16, 7])
def test_bits_are_those_of_the_dequantised_cache(
    page_size: int, dim: int, cache: torch.dtype
) -> None:
    """Of the 16-bit kernel with the same tiles."""
    case = PagedCase(
        K_LENS,
        q_lens=Q_LENS,
        max_seqlen_q=200,
        dim=dim,
        page_size=page_size,
        dtype=FP16,
        cache_dtype=cache,
    )
    (q, k_cache, v_cache, table, lens), options = case.build(CUDA)
    k_scale, v_scale = options.pop("k_scale"), options.pop("v_scale")
    k_scale.copy_(torch.tensor([0.03, 0.017], device=CUDA))
    v_scale.copy_(torch.tensor([1.9, 0.13], device=CUDA))
    if dim == 64 and page_size == 7:
        pytest.skip("16-bit keys of head dim 64 in slots have tiles of 128 queries")
    options["batch_invariant"] = page_size == 7  # 16-bit slots have no tiles of 192
    out, lse = ops.paged_attention(
        *(q, k_cache, v_cache, table, lens),
        k_scale=k_scale,
        v_scale=v_scale,
        return_lse=True,
        **options,
    )
    caches = [
        (codes.float() * scale.view(1, 1, -1, 1)).to(FP16)
        for codes, scale in ((k_cache, k_scale), (v_cache, v_scale))
    ]
    expected = ops.paged_attention(q, *caches, table, lens, return_lse=True, **options)
    assert_same_bits(out, expected[0])
    assert_same_bits(lse, expected[1])


@pytest.mark.usefixtures("tiles")
@each_cache
@each_kind
def test_a_thousand_repeats_give_the_same_bits(kind: str, cache: torch.dtype) -> None:
    args, scales = packed_8_bit((2048, 30, 700, 1300), heads=(16, 4), cache=cache, kind=kind)
    expected = attend(args, scales)
    out = torch.empty_like(expected)
    for _ in range(1000):
        out.fill_(torch.nan)
        attend(args, scales, out=out)
        assert_same_bits(out, expected)


@pytest.mark.usefixtures("tiles")
@each_kind
def test_one_graph_serves_hundreds_of_length_vectors(kind: str) -> None:
    batch, most = 6, 600
    args, scales = packed_8_bit((most,) * batch, heads=(8, 2), kind=kind)
    cu_q, cu_k = args[3:5]
    out = torch.empty_like(args[0])
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        attend(args, scales, out=out)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            attend(args, scales, out=out)
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
            assert_same_bits(out, attend(args, scales, out=torch.full_like(out, torch.nan)))


@each_cache
@each_kind
@pytest.mark.parametrize("rule", [{}, {"window": (200, 0)}], ids=str)
@pytest.mark.parametrize("page_size", [16, 7])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_batch_invariant_rows_do_not_depend_on_neighbours_or_chunks(
    dim: int, page_size: int, rule: dict[str, Any], kind: str, cache: torch.dtype
) -> None:
    """Nor on the capacities; cuts are at multiples of 384 tokens, of 128 where dim is above 64."""
    long, others = 1300, (1, 130, 40, 9)
    case = PagedCase(
        (long, *(length + 90 for length in others)),
        q_lens=(long, *others),
        heads_q=6,
        dim=dim,
        page_size=page_size,
        dtype=BF16,
        cache_dtype=cache,
        scale_kind=kind,
        **rule,
    )
    (q, k_cache, v_cache, table, lens), options = case.build(CUDA)
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


@each_cache
@each_kind
def test_only_the_output_is_written(kind: str, cache: torch.dtype) -> None:
    """Neighbours of a strided output, and rows of no sequence, stay as they are."""
    args, scales = packed_8_bit((129, 70), cache=cache, kind=kind)
    expected = attend(args, scales)
    args[0] = torch.cat([args[0], args[0][:2]])
    wide = torch.full((201, 8, 136), math.nan, dtype=BF16, device=CUDA)
    out = wide[:, 2:6, :128]
    attend(args, scales, out=out)
    assert_same_bits(out[:199], expected)
    wide[:199, 2:6, :128] = math.nan
    assert wide.isnan().all()


@each_cache
def test_caches_beyond_two_to_the_31_elements(cache: torch.dtype) -> None:
    pages, page, heads, dim = 2**31 // (16 * 8 * 128) + 3, 16, 8, 128
    caches = [torch.empty(pages, page, heads, dim, dtype=cache, device=CUDA) for _ in "kv"]
    ids = [pages - 1, 0, pages - 2, pages - 3, 1]
    for x in caches:
        for p in ids:
            x[p] = (8 * torch.randn(page, heads, dim, device=CUDA)).to(cache)
    scales = {f"{name}_scale": torch.full((), 0.125, device=CUDA) for name in "kv"}
    q = torch.randn(70, 8, dim, dtype=BF16, device=CUDA)
    lens = int32([73], CUDA)
    options = {**scales, "max_seqlen_q": 70}
    whole = ops.paged_attention(q, *caches, int32(ids, CUDA)[None], lens, **options)
    small = (*(x[ids] for x in caches), int32([0, 1, 2, 3, 4], CUDA)[None])
    assert_same_bits(whole, ops.paged_attention(q, *small, lens, **options))
