"""FlashAttention's signatures over our ops: what they compute, and what they refuse."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from ostinato.compat import flash_attn
from ostinato.compat.flash_attn import (
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)
from ostinato.ops import reference

CPU = torch.device("cpu")
RULES: list[dict[str, Any]] = [
    {},
    {"causal": True},
    {"causal": True, "window_size": (5, -1), "softmax_scale": 0.3},
    {"window_size": [3, 4], "softcap": 4.0},
]
# Of flash-attn 2.8, in order.
RULE = ("softmax_scale", "causal", "window_size", "softcap")
SIGNATURES = {
    flash_attn_func: [
        *("q", "k", "v", "dropout_p", *RULE),
        *("alibi_slopes", "deterministic", "return_attn_probs"),
    ],
    flash_attn_varlen_func: [
        *("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"),
        *("dropout_p", *RULE, "alibi_slopes", "deterministic", "return_attn_probs", "block_table"),
    ],
    flash_attn_with_kvcache: [
        *("q", "k_cache", "v_cache", "k", "v", "rotary_cos", "rotary_sin", "cache_seqlens"),
        *("cache_batch_idx", "cache_leftpad", "block_table", *RULE),
        *("rotary_interleaved", "alibi_slopes", "num_splits", "return_softmax_lse"),
    ],
}
# Of FlashAttention-3, beside these.
HOPPER = {"qv", "q_descale", "k_descale", "v_descale", "attention_chunk", "pack_gqa", "sm_margin"}
HOPPER_ONLY = {
    flash_attn_func: HOPPER | {"num_splits"},
    flash_attn_varlen_func: HOPPER | {"num_splits", "seqused_q", "seqused_k"},
    flash_attn_with_kvcache: HOPPER
    | {"page_table", "cu_seqlens_q", "cu_seqlens_k_new", "max_seqlen_q"}
    | {"rotary_seqlens", "scheduler_metadata"},
}


def randn(device: torch.device, *shape: int) -> torch.Tensor:
    """Return what our kernels serve on a GPU, and fp32 elsewhere."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return torch.randn(shape).to(device, dtype)


def int32(values: Any, device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **rule: Any) -> Any:
    """Attend from q [Lq, heads, dim] by the reference, given FlashAttention's names."""
    names = {"softmax_scale": "scale", "window_size": "window"}
    given = {names.get(name, name): value for name, value in rule.items()}
    if "window" in given:
        given["window"] = tuple(given["window"])
    return reference.attention(q, k, v, **{"causal": False, **given}, dtype=torch.float64)


def check(got: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = 2e-2 if got.dtype is torch.bfloat16 else 1e-4
    torch.testing.assert_close(got.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("function", SIGNATURES, ids=lambda function: function.__name__)
def test_arguments_come_in_the_order_of_flash_attn(function: Callable[..., Any]) -> None:
    parameters = inspect.signature(function).parameters.values()
    positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert positional == SIGNATURES[function]
    assert {p.name for p in parameters if p.kind is p.KEYWORD_ONLY} == HOPPER_ONLY[function]
    assert function.__name__ in flash_attn.__all__


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("lengths", [(9, 9), (3, 11), (11, 3), (1, 200)], ids=str)
def test_sequences_of_one_length(
    lengths: tuple[int, int], rule: dict[str, Any], device: torch.device
) -> None:
    q = randn(device, 3, lengths[0], 4, 64)
    k, v = (randn(device, 3, lengths[1], 2, 64) for _ in "kv")
    out, lse, nothing = flash_attn_func(q, k, v, 0.0, return_attn_probs=True, num_splits=3, **rule)
    assert nothing is None
    assert out.dtype is q.dtype
    assert lse.shape == (3, 4, lengths[0])
    for b in range(3):
        expected, expected_lse = exact(q[b], k[b], v[b], **rule)
        check(out[b], expected)
        check(lse[b].t(), expected_lse)
    assert torch.equal(flash_attn_func(q, k, v, **rule), out)


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_sequences_of_varying_lengths(rule: dict[str, Any], device: torch.device) -> None:
    q_offsets, k_offsets = (0, 5, 5, 80), (0, 9, 30, 130)
    q = randn(device, 80, 4, 64)
    # FlashAttention takes any layout.
    k, v = (randn(device, 130, 64, 2).transpose(1, 2) for _ in "kv")
    offsets = [int32(x, device) for x in (q_offsets, k_offsets)]
    out, lse, _ = flash_attn_varlen_func(q, k, v, *offsets, 75, 100, return_attn_probs=True, **rule)
    assert lse.shape == (4, 80)
    for b in range(3):
        rows, keys = slice(*q_offsets[b : b + 2]), slice(*k_offsets[b : b + 2])
        expected, expected_lse = exact(q[rows], k[keys], v[keys], **rule)
        check(out[rows], expected)
        check(lse[:, rows].t(), expected_lse)


@pytest.mark.parametrize("told", ["cu_seqlens_k", "seqused_k"])
@pytest.mark.parametrize("block_size", [16, 6])
def test_varying_lengths_in_blocks(block_size: int, told: str, device: torch.device) -> None:
    lengths, q_offsets = (40, 7), (0, 33, 40)
    k, v = (randn(device, 9, block_size, 2, 64) for _ in "kv")
    table = int32([[8, 1, 3, 0, 5, 7, 2], [4, 6, 0, 0, 0, 0, 0]], device)
    q = randn(device, 40, 4, 64)
    options = {"seqused_k": int32(lengths, device)} if told == "seqused_k" else {}
    cu_seqlens_k = None if options else int32([0, 40, 47], device)
    out = flash_attn_varlen_func(
        *(q, k, v, int32(q_offsets, device), cu_seqlens_k, 33, 40),
        causal=True,
        block_table=table,
        **options,
    )
    for b, length in enumerate(lengths):
        rows = slice(*q_offsets[b : b + 2])
        keys, values = (x[table[b].long()].flatten(0, 1)[:length] for x in (k, v))
        check(out[rows], exact(q[rows], keys, values, causal=True)[0])


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_values_of_another_dim(rule: dict[str, Any], device: torch.device) -> None:
    """As DeepSeek's prompts have them."""
    q, k, v = (randn(device, 2, 70, h, d) for h, d in ((4, 192), (2, 192), (2, 128)))
    out, lse, _ = flash_attn_func(q, k, v, return_attn_probs=True, **rule)
    offsets = [int32([0, 70, 140], device)] * 2
    flat = [x.flatten(0, 1) for x in (q, k, v)]
    varlen = flash_attn_varlen_func(*flat, *offsets, 70, 70, **rule)
    cached = flash_attn_with_kvcache(q, k, v, cache_seqlens=70, **rule)
    table = int32([[0], [1]], device)
    paged = flash_attn_varlen_func(*(flat[0], k, v, *offsets, 70, 70), block_table=table, **rule)
    for b in range(2):
        expected, expected_lse = exact(q[b], k[b], v[b], **rule)
        rows = slice(70 * b, 70 * (b + 1))
        for got in (out[b], varlen[rows], cached[b], paged[rows]):
            check(got, expected)
        check(lse[b].t(), expected_lse)


def test_a_cache_whose_values_have_another_dim_is_not_written() -> None:
    q, new, new_values = (torch.randn(2, 1, 2, d) for d in (24, 24, 16))
    caches = [torch.randn(2, 5, 2, d) for d in (24, 16)]
    old = [cache.clone() for cache in caches]
    with pytest.raises(ValueError, match=r"^v.*: got shape"):
        flash_attn_with_kvcache(q, *caches, new, new_values, cache_seqlens=3)
    assert all(torch.equal(*pair) for pair in zip(caches, old, strict=True))
    none = torch.zeros(2, 0, 2, 24)
    assert flash_attn_with_kvcache(none, *caches).shape == (2, 0, 2, 16)


class Cached:
    """A cache of either kind, and its contents sequence by sequence."""

    def __init__(self, kind: str, device: torch.device) -> None:
        self.batch, self.capacity = 3, 96
        self.options: dict[str, Any] = {}
        rows = [0, 1, 2]
        if kind == "rows by index":
            rows = [4, 0, 3]
            self.options["cache_batch_idx"] = int32(rows, device)
        page, pages = self.capacity, 5
        self.table = int32(rows, device)[:, None]
        if kind in ("block_table", "page_table"):
            page, pages = 8, 40
            self.table = torch.randperm(pages)[:36].int().view(3, 12).to(device)
            self.options[kind] = self.table
        self.caches = [randn(device, pages, page, 2, 64) for _ in "kv"]

    def tokens(self, which: int, b: int) -> torch.Tensor:
        return self.caches[which][self.table[b].long()].flatten(0, 1)


KINDS = ("rows", "rows by index", "block_table", "page_table")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lengths", [50, (5, 96, 0), None], ids=str)
@pytest.mark.parametrize("queries", [1, 3, 70])
def test_a_cache_of_either_kind(
    queries: int, lengths: Any, kind: str, device: torch.device
) -> None:
    cached = Cached(kind, device)
    q = randn(device, 3, queries, 4, 64)
    given = int32(lengths, device) if isinstance(lengths, tuple) else lengths
    out, lse = flash_attn_with_kvcache(
        *(q, *cached.caches),
        cache_seqlens=given,
        causal=True,
        return_softmax_lse=True,
        **cached.options,
    )
    assert out.shape == q.shape
    assert lse.shape == (3, 4, queries)
    for b in range(3):
        length = lengths[b] if isinstance(lengths, tuple) else lengths or 96
        keys, values = (cached.tokens(which, b)[:length] for which in (0, 1))
        expected, expected_lse = exact(q[b], keys, values, causal=True)
        check(out[b], expected)
        check(lse[b].t(), expected_lse)


def rotate(
    x: torch.Tensor, positions: Any, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool
) -> torch.Tensor:
    return reference.norm_and_rotate(
        x,
        None,
        0.0,
        torch.as_tensor(positions, device=x.device),
        torch.cat([cos, sin], dim=1),
        interleaved=interleaved,
        dtype=torch.float64,
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("queries", "new"), [(1, 1), (4, 4), (2, 5), (70, 70)])
@pytest.mark.parametrize("rotary", [None, True, False], ids=["plain", "interleaved", "halves"])
@pytest.mark.parametrize("causal", [True, False])
def test_new_keys_and_values_are_appended(
    causal: bool, rotary: bool | None, queries: int, new: int, kind: str, device: torch.device
) -> None:
    cached, lengths = Cached(kind, device), (20, 0, 11)
    q = randn(device, 3, queries, 4, 64)
    k, v = (randn(device, 3, new, 2, 64) for _ in "kv")
    options: dict[str, Any] = {"causal": causal, **cached.options}
    if rotary is not None:
        angles = torch.rand(96, 16, device=device) * 3
        cos, sin = angles.cos().to(q.dtype), angles.sin().to(q.dtype)
        options |= {"rotary_cos": cos, "rotary_sin": sin, "rotary_interleaved": rotary}
    before = [cache.clone() for cache in cached.caches]
    out = flash_attn_with_kvcache(
        q, *cached.caches, k, v, cache_seqlens=int32(lengths, device), **options
    )
    for b, length in enumerate(lengths):
        asked, keys = q[b], k[b]
        if rotary is not None:
            at = range(length, length + queries) if causal else [length] * queries
            asked = rotate(q[b], list(at), cos, sin, rotary)
            keys = rotate(k[b], list(range(length, length + new)), cos, sin, rotary)
        for which, x in enumerate((keys, v[b])):
            tokens = cached.tokens(which, b)
            check(tokens[length : length + new], x.double())
        all_keys, values = (cached.tokens(which, b)[: length + new] for which in (0, 1))
        check(out[b], exact(asked, all_keys, values, causal=causal)[0])
    for cache, old in zip(cached.caches, before, strict=True):
        assert (cache != old).flatten(2).any(-1).sum() <= 3 * new


def test_rotated_tokens_without_room_are_not_written(device: torch.device) -> None:
    q, k, v = (randn(device, 1, 4, 2, 64) for _ in "qkv")
    caches = [randn(device, 1, 8, 2, 64) for _ in "kv"]
    angles = torch.rand(8, 32, device=device)
    options: dict[str, Any] = {
        "rotary_cos": angles.cos().to(q.dtype),
        "rotary_sin": angles.sin().to(q.dtype),
        "causal": True,
    }
    before = [cache.clone() for cache in caches]
    lengths = int32([6], device)
    flash_attn_with_kvcache(q, *caches, k, v, cache_seqlens=lengths, **options)
    for cache, old in zip(caches, before, strict=True):
        assert (cache != old).flatten(2).any(-1).tolist() == [[False] * 6 + [True] * 2]


@pytest.mark.parametrize(
    "change",
    [
        {"softcap": -1.0},
        {"causal": 1},
        {"window_size": (1.5, 2)},
        {"q": torch.zeros(2, 1, 5, 8)},
        {"q": torch.zeros(2, 1, 4, 8).double()},
        {"v": torch.zeros(1, 2, 2, 8)},
        {"rotary_cos": torch.zeros(4), "rotary_sin": torch.zeros(4)},
        {"rotary_cos": torch.zeros(4, 2), "rotary_sin": torch.zeros(4, 2)},
    ],
    ids=lambda change: "-".join(change),
)
def test_a_refused_call_has_written_nothing(change: Arguments) -> None:
    caches = [torch.zeros(2, 5, 2, 8) for _ in "kv"]
    new = {name: torch.ones(2, 1, 2, 8) for name in "kv"}
    arguments: Arguments = {
        **of_kvcache(),
        "k_cache": caches[0],
        "v_cache": caches[1],
        "cache_seqlens": 2,
        **new,
    }
    flash_attn_with_kvcache(**arguments)
    for cache in caches:
        cache.zero_()
    with pytest.raises((TypeError, ValueError)):
        flash_attn_with_kvcache(**{**arguments, **change})
    assert not any(cache.any() for cache in caches)


def test_tokens_without_room_are_not_written(device: torch.device) -> None:
    q, k, v = (randn(device, 1, 4, 2, 64) for _ in "qkv")
    caches = [randn(device, 3, 8, 2, 64) for _ in "kv"]
    before = [cache.clone() for cache in caches]
    flash_attn_with_kvcache(
        *(q, *caches, k, v), cache_seqlens=6, causal=True, cache_batch_idx=int32([1], device)
    )
    for cache, old, new in zip(caches, before, (k, v), strict=True):
        assert torch.equal(cache[1, 6:], new[0, :2])
        cache[1, 6:] = old[1, 6:]
        assert torch.equal(cache, old)


def test_queries_of_varying_lengths(device: torch.device) -> None:
    cached, offsets = Cached("block_table", device), (0, 1, 40, 41)
    q = randn(device, 41, 4, 64)
    out, lse = flash_attn_with_kvcache(
        *(q, *cached.caches),
        cache_seqlens=50,
        causal=True,
        cu_seqlens_q=int32(offsets, device),
        max_seqlen_q=39,
        return_softmax_lse=True,
        **cached.options,
    )
    assert lse.shape == (4, 41)
    for b in range(3):
        rows = slice(*offsets[b : b + 2])
        keys, values = (cached.tokens(which, b)[:50] for which in (0, 1))
        check(out[rows], exact(q[rows], keys, values, causal=True)[0])


def test_no_queries(device: torch.device) -> None:
    q, caches = randn(device, 2, 0, 4, 64), [randn(device, 2, 8, 2, 64) for _ in "kv"]
    assert flash_attn_with_kvcache(q, *caches).shape == q.shape
    assert flash_attn_func(q, *caches).shape == q.shape


@pytest.mark.gpu
def test_one_graph_appends_at_new_lengths() -> None:
    device = torch.device("cuda")
    cached = Cached("block_table", device)
    q, k, v = (randn(device, 3, 1, heads, 64) for heads in (4, 2, 2))
    lengths = int32((7, 0, 30), device)

    def step() -> Any:
        return flash_attn_with_kvcache(
            q, *cached.caches, k, v, cache_seqlens=lengths, causal=True, **cached.options
        )

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        out = step()
    for _ in range(5):
        lengths += 1
        for x in (q, k, v):
            x.copy_(torch.randn_like(x))
        graph.replay()
        assert torch.equal(out, step())


Arguments = dict[str, Any]


def of_func() -> Arguments:
    return {"q": torch.zeros(2, 3, 4, 8), **{name: torch.zeros(2, 5, 2, 8) for name in "kv"}}


def of_varlen() -> Arguments:
    offsets = {name: int32([0, 3], CPU) for name in ("cu_seqlens_q", "cu_seqlens_k")}
    shapes = {"q": (3, 4, 8), "k": (3, 2, 8), "v": (3, 2, 8)}
    tensors = {name: torch.zeros(shape) for name, shape in shapes.items()}
    return {**tensors, **offsets, "max_seqlen_q": 3, "max_seqlen_k": 3}


def of_kvcache() -> Arguments:
    caches = {name: torch.zeros(2, 5, 2, 8) for name in ("k_cache", "v_cache")}
    return {"q": torch.zeros(2, 3, 4, 8), **caches}


SOME = torch.zeros(2)
EVERYWHERE: list[Arguments] = [
    *({name: SOME} for name in ("alibi_slopes", "qv", "q_descale", "k_descale", "v_descale")),
    *({"attention_chunk": 4}, {"window_size": (1, 2, 3)}, {"softmax_scale": math.nan}),
    *({"window_size": size} for size in (4, (1.5, 0), "ab")),
]
OTHERS = (None, np.zeros((2, 5, 2, 8)))
TABLE = torch.zeros(2, 1, dtype=torch.int32)
REFUSED: list[tuple[Callable[..., Any], Callable[[], Arguments], Arguments, str]] = [
    *((flash_attn_func, of_func, change, "") for change in ({"dropout_p": 0.1}, *EVERYWHERE)),
    (flash_attn_func, of_func, {"q": torch.zeros(3, 4, 8)}, ""),
    (flash_attn_func, of_func, {"k": torch.zeros(3, 5, 2, 8)}, ""),
    (flash_attn_func, of_func, {"v": torch.zeros(2, 4, 2, 8)}, ""),
    (flash_attn_func, of_func, {"v": torch.zeros(2, 5, 2, 0)}, ""),
    *((flash_attn_func, of_func, {name: other}, "") for name in "qkv" for other in OTHERS),
    *((flash_attn_varlen_func, of_varlen, change, "") for change in EVERYWHERE),
    (flash_attn_varlen_func, of_varlen, {"dropout_p": 0.5}, ""),
    *((flash_attn_varlen_func, of_varlen, {name: None}, "") for name in ("q", "k", "v")),
    *((flash_attn_varlen_func, of_varlen, {f"max_seqlen_{x}": None}, "") for x in "qk"),
    (flash_attn_varlen_func, of_varlen, {"max_seqlen_k": -1}, ""),
    *((flash_attn_varlen_func, of_varlen, {n: SOME.int()}, "") for n in ("seqused_q", "seqused_k")),
    (flash_attn_varlen_func, of_varlen, {"cu_seqlens_k": None}, ""),
    (flash_attn_varlen_func, of_varlen, {"cu_seqlens_k": None, "block_table": TABLE}, ""),
    (flash_attn_varlen_func, of_varlen, {"cu_seqlens_q": int32([0, 9], CPU)}, ""),
    *((flash_attn_with_kvcache, of_kvcache, change, "") for change in EVERYWHERE),
    *(
        (flash_attn_with_kvcache, of_kvcache, {name: SOME}, "")
        for name in ("cache_leftpad", "cu_seqlens_k_new", "rotary_seqlens", "q", "v_cache")
    ),
    (flash_attn_with_kvcache, of_kvcache, {"k_cache": torch.zeros(5, 2, 8)}, ""),
    (flash_attn_with_kvcache, of_kvcache, {"k_cache": torch.zeros(1, 5, 2, 8)}, ""),
    (flash_attn_with_kvcache, of_kvcache, {"cache_seqlens": -1}, ""),
    (flash_attn_with_kvcache, of_kvcache, {"cache_seqlens": torch.zeros(2)}, ""),
    (flash_attn_with_kvcache, of_kvcache, {"cache_seqlens": torch.zeros(3).int()}, ""),
    (flash_attn_with_kvcache, of_kvcache, {"block_table": TABLE.long()}, ""),
    (flash_attn_with_kvcache, of_kvcache, {"page_table": TABLE, "block_table": TABLE}, ""),
    (flash_attn_with_kvcache, of_kvcache, {"cache_batch_idx": SOME, "block_table": TABLE}, ""),
    (flash_attn_with_kvcache, of_kvcache, {"k": torch.zeros(2, 1, 2, 8)}, "v"),
    (flash_attn_with_kvcache, of_kvcache, {n: torch.zeros(2, 1, 2, 8) for n in "kv"}, "cache_seq"),
    (flash_attn_with_kvcache, of_kvcache, {"rotary_cos": SOME, "rotary_sin": SOME}, ""),
    (flash_attn_with_kvcache, of_kvcache, {"rotary_cos": SOME}, "rotary_sin"),
    (flash_attn_with_kvcache, of_kvcache, {"cu_seqlens_q": int32([0, 1, 2], CPU)}, "max_seqlen_q"),
]


@pytest.mark.parametrize(
    ("function", "arguments", "change", "named"),
    REFUSED,
    ids=[f"{f.__name__}-{'-'.join(change)}" for f, _, change, _ in REFUSED],
)
def test_what_is_not_honoured_is_refused_by_name(
    function: Callable[..., Any],
    arguments: Callable[[], Arguments],
    change: Arguments,
    named: str,
) -> None:
    function(**arguments())
    with pytest.raises((TypeError, ValueError), match=f"^{named or next(iter(change))}"):
        function(**{**arguments(), **change})


def test_no_window_is_one_without_a_limit() -> None:
    q, k, v = (torch.randn(2, 5, heads, 8) for heads in (4, 2, 2))
    assert flash_attn_func(q, k, v, window_size=None).equal(flash_attn_func(q, k, v))


def test_negative_lengths_are_of_nothing() -> None:
    arguments = of_kvcache()
    caches, new = (arguments["k_cache"], arguments["v_cache"]), torch.ones(2, 1, 2, 8)
    lengths = torch.tensor([-3, 2], dtype=torch.int32)
    flash_attn_with_kvcache(arguments["q"][:, :1], *caches, new, new, cache_seqlens=lengths)
    for cache in caches:
        assert cache[1, 2].eq(1).all()
        assert cache.sum() == new[1].sum()


def test_gradients_are_refused_unless_nobody_wants_them() -> None:
    arguments = of_func()
    arguments["k"].requires_grad_()
    with pytest.raises(ValueError, match="q, k, v: got a tensor that requires a gradient"):
        flash_attn_func(**arguments)
    with torch.no_grad():
        assert not flash_attn_func(**arguments).requires_grad


@pytest.mark.gpu
def test_bits_of_a_decode_step_do_not_depend_on_its_bucket() -> None:
    device = torch.device("cuda")
    caches = [randn(device, 12, 256, 2, 128) for _ in "kv"]
    table = int32([[3, 1, 7], [4, 9, 2]], device)
    lengths, q = int32([700, 515], device), randn(device, 2, 1, 16, 128)
    few = flash_attn_with_kvcache(q, *caches, cache_seqlens=lengths, block_table=table)
    wide = torch.zeros(16, 8, dtype=torch.int32, device=device)
    wide[:2, :3] = table
    many = flash_attn_with_kvcache(
        *(torch.cat([q, q.new_zeros(14, 1, 16, 128)]), *caches),
        cache_seqlens=torch.cat([lengths, lengths.new_zeros(14)]),
        block_table=wide,
    )
    assert torch.equal(many[:2], few)


def test_lengths_may_be_tensors_of_one_number() -> None:
    """As transformers makes them of offsets."""
    q, offsets = torch.randn(5, 4, 16), int32([0, 3, 5], CPU)
    most = offsets.diff().max()
    out = flash_attn_varlen_func(q, q, q, offsets, offsets, most, most)
    assert torch.equal(out, flash_attn_varlen_func(q, q, q, offsets, offsets, 3, 3))
    with pytest.raises(TypeError, match=r"max_seqlen_q: got a tensor of torch.float32"):
        flash_attn_varlen_func(q, q, q, offsets, offsets, most.float(), most)
