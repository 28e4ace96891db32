"""The kernel behind `append_kv` on a GPU: its bits beside those of torch's operators on the CPU.

Without a norm every step of both is rounded alike, so that they must agree to the bit. With one
the squares are added in another order, and results are held to the accuracy of fp32.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from append_cases import GPU, Case, on_gpu, written_copies
from ops_cases import E4M3, FLOATS, assert_close, assert_same_bits, int32

from ostinato import ops
from ostinato.ops import reference
from ostinato.ops.attention import append_kv_cuda
from ostinato.ops.common.pdl import pdl

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("kernels")]

BF16 = torch.bfloat16


def assert_same_written(got: dict[str, Any], expected: dict[str, Any]) -> None:
    for name, tensor in written_copies(got).items():
        assert_same_bits(tensor.cpu(), expected[name].cpu())


def check_bits(case: Case, **options: Any) -> None:
    arguments = case.build()
    got = on_gpu(arguments)
    q_out = ops.append_kv(**got, **options)
    expected = ops.append_kv(**arguments)
    assert q_out is not None
    assert expected is not None
    assert_same_bits(q_out.cpu(), expected)
    assert_same_written(got, arguments)


_SIZES = (
    *((8, 8), (16, 0), (64, 64), (64, 16), (64, 24), (80, 80), (80, 32), (96, 96), (112, 112)),
    *((128, 128), (128, 0), (128, 2), (128, 64), (192, 192), (256, 64), (256, 256), (512, 512)),
    *((1, 0), (2, 2), (5, 4), (20, 20), (100, 100), (100, 6), (130, 66), (511, 510)),
    *((520, 512), (1040, 1040), (1040, 0), (1031, 1030)),
)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("dim", "rotary_dim"), _SIZES)
def test_heads_of_any_size(
    dtype: torch.dtype, interleaved: bool, dim: int, rotary_dim: int
) -> None:
    case = Case(dtype=dtype, interleaved=interleaved, dim=dim, rotary_dim=rotary_dim)
    check_bits(case)
    check_bits(replace(case, cache_dtype=torch.int8))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("cache_dtype", [torch.int8, E4M3], ids=str)
@pytest.mark.parametrize("k_scale", ["one", "head", "token", "shown"])
@pytest.mark.parametrize("v_scale", ["one", "head", "token", "shown"])
def test_scales(dtype: torch.dtype, cache_dtype: torch.dtype, k_scale: str, v_scale: str) -> None:
    scales = (k_scale, v_scale)
    check_bits(Case(dtype=dtype, cache_dtype=cache_dtype, scales=scales, heads_kv=3, page_size=4))
    check_bits(Case(dtype=dtype, cache_dtype=cache_dtype, scales=scales, dim=1040, heads_kv=1))


@pytest.mark.parametrize("layout", ["dense", "heads first", "strided"])
@pytest.mark.parametrize("cache_dtype", [None, torch.int8, E4M3], ids=str)
@pytest.mark.parametrize("dim", [128, 100, 640])
def test_layouts_of_the_cache(layout: str, cache_dtype: torch.dtype | None, dim: int) -> None:
    check_bits(Case(layout=layout, cache_dtype=cache_dtype, dim=dim))
    # Nor is anything written between the elements of the cache.
    arguments = on_gpu(Case(layout=layout, cache_dtype=cache_dtype, dim=dim).build())
    cache = arguments["k_cache"]
    base = cache if cache._base is None else cache._base
    before, kept = base.clone(), cache.clone()
    ops.append_kv(**arguments)
    assert not torch.equal(base.view(torch.int8), before.view(torch.int8))
    cache.copy_(kept)
    assert_same_bits(base, before)


@pytest.mark.parametrize(("heads_q", "heads_kv"), [(32, 8), (1, 1), (64, 8), (7, 7), (200, 3)])
@pytest.mark.parametrize("tokens", [1, 2, 33, 300])
def test_numbers_of_heads_and_tokens(heads_q: int, heads_kv: int, tokens: int) -> None:
    check_bits(Case(heads_q=heads_q, heads_kv=heads_kv, tokens=tokens, page_size=16))


@pytest.mark.parametrize("name", ["q", "k", "v", "q_out", "cos_sin"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_rows_that_no_vector_fits(name: str, dtype: torch.dtype) -> None:
    arguments = Case(dtype=dtype).build()
    expected = ops.append_kv(**{**arguments, **written_copies(arguments)})
    got = on_gpu(arguments)
    x = got["q"] if name == "q_out" else got[name]
    shifted = torch.zeros(*x.shape[:-1], x.size(-1) + 1, dtype=x.dtype, device=GPU)[..., 1:]
    got[name] = shifted.copy_(x)
    assert expected is not None
    q_out = ops.append_kv(**got)
    assert q_out is not None
    assert_same_bits(q_out.cpu(), expected)


@pytest.mark.parametrize("dim", [128, 100, 1040])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("norms", [("", ""), ("same", "fp32")])
def test_q_out_may_be_q(dim: int, norms: tuple[str, str], last: bool) -> None:
    arguments = on_gpu(Case(dim=dim, norms=norms, norm_after_rotation=last).build())
    expected = ops.append_kv(**{**arguments, **written_copies(arguments)})
    assert expected is not None
    assert ops.append_kv(**arguments, q_out=arguments["q"]) is arguments["q"]
    assert_same_bits(arguments["q"], expected)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("norms", [("same", "fp32"), ("fp32", "same"), ("", "same"), ("fp32", "")])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(
    ("dim", "rotary_dim"), [(128, 128), (64, 0), (100, 20), (256, 256), (1040, 512)]
)
def test_norms(
    dtype: torch.dtype,
    interleaved: bool,
    norms: tuple[str, str],
    last: bool,
    dim: int,
    rotary_dim: int,
) -> None:
    case = Case(
        dtype=dtype,
        interleaved=interleaved,
        norms=norms,
        norm_after_rotation=last,
        dim=dim,
        rotary_dim=rotary_dim,
    )
    arguments = {**case.build(), "norm_eps": 1e-3}
    if rotary_dim:
        arguments["cos_sin"] *= 1.7  # an amplitude, which a norm after the rotation takes out
    got = on_gpu(arguments)
    q_out = ops.append_kv(**got)
    assert q_out is not None

    def twin(name: str) -> Callable[[torch.dtype], torch.Tensor]:
        def compute(precision: torch.dtype) -> torch.Tensor:
            fresh = {**arguments, **written_copies(arguments)}
            for cache in ("k_cache", "v_cache"):
                fresh[cache] = fresh[cache].to(precision)
            result = reference.append_kv(**fresh, dtype=precision)
            return result if name == "q_out" and result is not None else fresh[name]

        return compute

    assert_close(q_out.cpu(), twin("q_out"))
    for name in ("k_cache", "v_cache"):
        assert_close(got[name].cpu(), twin(name))


@pytest.mark.parametrize("cache_dtype", [torch.int8, E4M3], ids=str)
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("dim", [128, 100])
def test_norms_before_quantization(cache_dtype: torch.dtype, dim: int, last: bool) -> None:
    case = Case(
        cache_dtype=cache_dtype,
        dim=dim,
        norms=("same", "fp32"),
        norm_after_rotation=last,
        tokens=40,
    )
    arguments = case.build()
    got = on_gpu(arguments)
    ops.append_kv(**got)
    reference.append_kv(**arguments)
    assert_same_bits(got["v_cache"].cpu(), arguments["v_cache"])
    torch.testing.assert_close(got["k_scale"].cpu(), arguments["k_scale"], rtol=1e-6, atol=0.0)
    # A key on the edge between two steps may fall to either side.
    ours, theirs = got["k_cache"].cpu().float(), arguments["k_cache"].float()
    assert ((ours - theirs).abs() <= theirs.abs().clamp(min=8) / 8).all()
    assert (ours != theirs).sum() <= 5


def test_extreme_rows() -> None:
    for cache_dtype in (torch.int8, E4M3):
        case = Case(cache_dtype=cache_dtype, dtype=torch.float32, rotary_dim=0, tokens=6)
        arguments = case.build()
        arguments["slot_mapping"] = torch.arange(6)
        k = arguments["k"]
        k[0], k[1], k[2], k[3], k[4] = 0.0, -0.0, 1e-42, 3e38, 1e-30
        got = on_gpu(arguments)
        ops.append_kv(**got)
        ops.append_kv(**arguments)
        assert_same_written(got, arguments)
        k[2, 0, 7] = math.nan
        got = on_gpu(arguments)
        ops.append_kv(**got)
        assert got["k_scale"].flatten(0, 1)[2, 0].isnan()
        assert_same_bits(got["k_cache"][0, 2, 1].cpu(), arguments["k_cache"][0, 2, 1])


@pytest.mark.parametrize("dim", [64, 128, 1040])
def test_an_int8_head_with_a_nan_shows_it_in_its_scale(dim: int) -> None:
    case = Case(cache_dtype=torch.int8, scales=("shown", "shown"), rotary_dim=0, dim=dim)
    arguments = case.build()
    arguments["slot_mapping"] = torch.arange(case.tokens)
    arguments["k"][2, 0, 7] = arguments["v"][3, 1, dim - 1] = math.nan
    got = on_gpu(arguments)
    ops.append_kv(**got)
    ops.append_kv(**arguments)
    for name, token, head in (("k_scale_out", 2, 0), ("v_scale_out", 3, 1)):
        shown = got[name].flatten(0, 1).isnan().nonzero().tolist()
        assert shown == [[token, head]]
        torch.testing.assert_close(got[name].cpu(), arguments[name], equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize("cache_dtype", [torch.int8, E4M3], ids=str)
@pytest.mark.parametrize("scale", [1e-39, 1e-30, 1e-4, 1e30, 3e38])
def test_extreme_fixed_scales(cache_dtype: torch.dtype, scale: float) -> None:
    arguments = Case(cache_dtype=cache_dtype, dtype=torch.float32, scales=("one", "head")).build()
    for name in ("k_scale", "v_scale"):
        arguments[name].fill_(scale)
    arguments["v"][:4] *= scale
    got = on_gpu(arguments)
    ops.append_kv(**got)
    ops.append_kv(**arguments)
    assert_same_written(got, arguments)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("dim", [128, 100, 1040])
def test_bits_do_not_depend_on_alignment(dim: int, last: bool) -> None:
    arguments = on_gpu(Case(dim=dim, norms=("same", "fp32"), norm_after_rotation=last).build())
    shifted = written_copies(arguments)
    weight = torch.empty(dim + 1, device=GPU)[1:].copy_(arguments["k_norm_weight"])
    other = ops.append_kv(**{**arguments, **shifted, "k_norm_weight": weight})
    q_out = ops.append_kv(**arguments)
    assert q_out is not None
    assert other is not None
    assert_same_bits(q_out, other)
    assert_same_bits(arguments["k_cache"], shifted["k_cache"])


def test_without_q_and_without_tokens() -> None:
    arguments = Case().build()
    got = on_gpu(arguments)
    del got["q"]
    assert ops.append_kv(**got) is None
    ops.append_kv(**arguments)
    assert_same_bits(got["k_cache"].cpu(), arguments["k_cache"])
    got = on_gpu(Case(tokens=0).build())
    before = got["k_cache"].clone()
    ops.append_kv(**got)
    assert_same_bits(got["k_cache"], before)


@pytest.mark.parametrize("cache_dtype", [None, torch.int8, E4M3], ids=str)
@pytest.mark.parametrize("norms", [("", ""), ("same", "same")])
def test_one_graph_serves_many_slots(
    cache_dtype: torch.dtype | None, norms: tuple[str, str]
) -> None:
    case = Case(cache_dtype=cache_dtype, norms=norms, tokens=12)
    static = on_gpu(case.build())
    q_out = torch.empty_like(static["q"])
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        ops.append_kv(**static, q_out=q_out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        ops.append_kv(**static, q_out=q_out)
    for round_ in range(20):
        fresh = on_gpu(case.build())
        if round_ == 7:
            fresh["slot_mapping"].fill_(-1)
        for name, value in fresh.items():
            if isinstance(value, torch.Tensor):
                static[name].copy_(value)
        graph.replay()
        assert_same_bits(q_out, ops.append_kv(**fresh))
        assert_same_written(static, fresh)


def test_a_chain_of_launches_waits_for_each_one() -> None:
    """Every launch turns what the one before it has written, and writes what that one has read."""
    arguments = on_gpu(Case(tokens=64, heads_q=32, heads_kv=8, page_size=16).build())
    results = []
    for overlap in (True, False):
        q, q_out = arguments["q"].clone(), torch.empty_like(arguments["q"])
        cache = written_copies(arguments)
        with pdl(overlap):
            for _ in range(200):
                ops.append_kv(**{**arguments, **cache, "q": q, "k": q[:, 3:11]}, q_out=q_out)
                q, q_out = q_out, q
        results.append((q, cache["k_cache"], cache["v_cache"]))
    for overlapped, alone in zip(*results, strict=True):
        assert_same_bits(overlapped, alone)


def test_equal_calls_give_equal_bits() -> None:
    case = Case(tokens=100, cache_dtype=E4M3, norms=("fp32", "same"))
    arguments = on_gpu(case.build())
    first = ops.append_kv(**arguments)
    expected = written_copies(arguments)
    assert first is not None
    for _ in range(100):
        assert_same_bits(first, ops.append_kv(**arguments))
    for name, value in expected.items():
        assert_same_bits(arguments[name], value)


def test_caches_of_more_than_2_31_elements() -> None:
    case = Case(page_size=16, heads_kv=8, tokens=4)
    arguments = on_gpu(case.build())
    pages = 2**31 // (16 * 8 * 128) + 8
    for name in ("k_cache", "v_cache"):
        arguments[name] = torch.empty(pages, 16, 8, 128, dtype=BF16, device=GPU)
    last = pages * 16 - 1
    arguments["slot_mapping"] = torch.tensor([last, 3, last - 40, -1], device=GPU)
    ops.append_kv(**arguments)
    small = {**arguments, "slot_mapping": torch.tensor([7, 3, 4, -1], device=GPU)}
    for name in ("k_cache", "v_cache"):
        small[name] = torch.zeros(1, 16, 8, 128, dtype=BF16, device=GPU)
    ops.append_kv(**small)
    for name in ("k_cache", "v_cache"):
        whole, part = arguments[name].flatten(0, 1), small[name].flatten(0, 1)
        for slot, other in ((last, 7), (3, 3), (last - 40, 4)):
            assert_same_bits(whole[slot], part[other])


def test_more_than_2_32_slots() -> None:
    pages, page_size = 2**32 // 48 + 3, 48
    x = torch.tensor([5.0, -7.0, 9.0], device=GPU).view(3, 1, 1)
    caches = [torch.zeros(pages, page_size, 1, 1, dtype=torch.int8, device=GPU) for _ in range(2)]
    scale = torch.ones((), device=GPU)
    slots = [pages * page_size - 1, 2**32 + 1, 1]
    ops.append_kv(x, -x, *caches, torch.tensor(slots, device=GPU), k_scale=scale, v_scale=scale)
    for cache, sign in zip(caches, (1, -1), strict=True):
        written = cache.view(-1)[slots[0]], cache.view(-1)[slots[1]], cache.view(-1)[slots[2]]
        assert [int(code) for code in written] == [5 * sign, -7 * sign, 9 * sign]


def test_tokens_more_than_2_31_elements_apart() -> None:
    arguments = on_gpu(Case(tokens=2).build())
    arguments["slot_mapping"] = torch.tensor([0, 1], device=GPU)
    expected = ops.append_kv(**{**arguments, **written_copies(arguments)})
    apart = 2**31 + 64
    storage = torch.empty(apart + 10 * 128, dtype=BF16, device=GPU)
    fused = storage.as_strided((2, 10, 128), (apart, 128, 1))
    fused.copy_(torch.cat([arguments[name] for name in ("q", "k", "v")], dim=1))
    arguments["q"], arguments["k"], arguments["v"] = fused.split([6, 2, 2], dim=1)
    q_out = ops.append_kv(**arguments, q_out=arguments["q"])
    assert q_out is not None
    assert expected is not None
    assert_same_bits(q_out.contiguous(), expected)


@pytest.mark.parametrize(
    ("name", "change", "error", "match"),
    [
        ("slot_mapping", torch.Tensor.cpu, ValueError, "slot_mapping: got a tensor on cpu"),
        ("positions", torch.Tensor.cpu, ValueError, "positions: got a tensor on cpu"),
        ("q", lambda q: q[..., :64], ValueError, "q: got shape"),
        ("v", torch.Tensor.float, TypeError, "v: got dtype torch.float32"),
        ("v_cache", lambda cache: cache[1:], ValueError, "v_cache: got shape"),
    ],
)
def test_bad_input_is_refused_before_anything_is_launched(
    name: str,
    change: Callable[[torch.Tensor], torch.Tensor],
    error: type[Exception],
    match: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arguments = on_gpu(Case().build())
    arguments[name] = change(arguments[name])
    monkeypatch.setattr(append_kv_cuda, "load", lambda *_, **__: pytest.fail("launches"))
    with pytest.raises(error, match=match):
        ops.append_kv(**arguments)


@pytest.mark.parametrize(
    ("name", "value", "match"),
    [
        ("slot_mapping", 25, "slot_mapping: got 25"),
        ("positions", 40, "positions: got 40 for token"),
    ],
)
def test_check_bounds_looks_at_the_device(
    name: str, value: int, match: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = on_gpu(Case(tokens=9, page_size=5).build())
    arguments["slot_mapping"] = torch.arange(9, device=GPU)
    if name == "positions":
        arguments[name] = int32([value] * 9, GPU)
    else:
        arguments[name][4] = value
    monkeypatch.setattr(append_kv_cuda, "load", lambda *_, **__: pytest.fail("launches"))
    with pytest.raises(ValueError, match=match):
        ops.append_kv(**arguments, check_bounds=True)
