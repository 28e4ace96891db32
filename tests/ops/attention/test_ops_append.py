"""Writing keys and values into the cache against its reference."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from ops_cases import E4M3, FLOATS, assert_close, assert_same_bits, int32, laid_out

from ostinato import ops
from ostinato.ops import reference

pytestmark = pytest.mark.usefixtures("kernels")

PAGES, PAGE_SIZE, HEADS_Q, HEADS_KV, DIM = 4, 5, 6, 2, 16
SLOTS = [7, -1, 0, 19, 12, -1, 3]


def build(
    device: torch.device,
    *,
    dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype | None = None,
    rotary_dim: int | None = DIM,
    norm: bool = False,
    scale: str | None = None,
    layout: str = "dense",
    slots: list[int] | None = None,
) -> dict[str, Any]:
    slots = SLOTS if slots is None else slots
    tokens = len(slots)
    fused = torch.randn(tokens, HEADS_Q + 2 * HEADS_KV, DIM).to(dtype).to(device)
    q, k, v = fused.split([HEADS_Q, HEADS_KV, HEADS_KV], dim=1)
    cache = torch.full((PAGES, PAGE_SIZE, HEADS_KV, DIM), 3.0).to(cache_dtype or dtype).to(device)
    arguments: dict[str, Any] = {
        "q": q,
        "k": k,
        "v": v,
        "k_cache": laid_out(cache, layout),
        "v_cache": laid_out(cache.clone(), layout),
        "slot_mapping": torch.tensor(slots, dtype=torch.int64, device=device),
    }
    if rotary_dim is not None:
        angles = torch.randn(11, rotary_dim // 2)
        arguments["cos_sin"] = torch.cat([angles.cos(), angles.sin()], dim=1).to(device)
        arguments["positions"] = torch.randint(11, (tokens,), dtype=torch.int32).to(device)
    if norm:
        arguments["q_norm_weight"] = torch.randn(DIM).to(dtype).to(device)
        arguments["k_norm_weight"] = torch.randn(DIM).to(dtype).to(device)
        arguments["norm_eps"] = 1e-3
    if scale is not None:
        shape = {
            "scalar": (),
            "one": (1,),
            "head": (HEADS_KV,),
            "token": (PAGES, PAGE_SIZE, HEADS_KV),
        }[scale]
        arguments["k_scale"] = torch.full(shape, 0.03).to(device)
        arguments["v_scale"] = (torch.rand(shape) / 50 + 0.01).to(device)
    return arguments


def copied(arguments: dict[str, Any]) -> dict[str, Any]:
    return {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}


def check(arguments: dict[str, Any], **options: Any) -> None:
    """Compare q_out and, where nothing is quantised, the caches with the fp64 reference."""
    before = copied(arguments)
    q_out = ops.append_kv(**arguments, **options)
    for name in ("q", "k", "v", "slot_mapping"):
        assert_same_bits(arguments[name], before[name])

    def twin(name: str) -> Any:
        def compute(dtype: torch.dtype) -> torch.Tensor:
            fresh = copied(before)
            for cache in ("k_cache", "v_cache"):
                fresh[cache] = fresh[cache].to(dtype)
            result = reference.append_kv(**fresh, **options, dtype=dtype)
            return result if name == "q_out" else fresh[name]

        return compute

    assert q_out is not None
    assert_close(q_out, twin("q_out"))
    assert_close(arguments["k_cache"], twin("k_cache"))
    assert_close(arguments["v_cache"], twin("v_cache"))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("rotary_dim", [None, DIM, 6, 2])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("norm", ["", "first", "last"])
def test_error_is_within_twice_torchs(
    dtype: torch.dtype,
    rotary_dim: int | None,
    interleaved: bool,
    norm: str,
    device: torch.device,
) -> None:
    arguments = build(device, dtype=dtype, rotary_dim=rotary_dim, norm=norm != "")
    check(arguments, interleaved=interleaved, norm_after_rotation=norm == "last")


@pytest.mark.parametrize("interleaved", [False, True])
def test_norm_and_rotation_do_not_commute(interleaved: bool, device: torch.device) -> None:
    """Weights differ from element to element, and cosines and sines have an amplitude."""
    arguments = build(device, norm=True)
    arguments["cos_sin"] *= 1.7
    last = copied(arguments)
    first_q = ops.append_kv(**arguments, interleaved=interleaved)
    last_q = ops.append_kv(**last, interleaved=interleaved, norm_after_rotation=True)
    assert first_q is not None
    assert last_q is not None
    assert (first_q - last_q).abs().max() > 0.5
    mean_squares = (last_q / arguments["q_norm_weight"]).square().mean(-1)
    torch.testing.assert_close(mean_squares, torch.ones_like(mean_squares), rtol=0.01, atol=0.01)
    assert (arguments["k_cache"] - last["k_cache"]).abs().max() > 0.5
    assert_same_bits(arguments["v_cache"], last["v_cache"])


@pytest.mark.parametrize("layout", ["heads first", "strided"])
def test_strided_caches(layout: str, device: torch.device) -> None:
    check(build(device, layout=layout, norm=True))


@pytest.mark.parametrize("slots", [[], [-1, -1], [-1, 4], [0], list(range(20))], ids=str)
def test_slots(slots: list[int], device: torch.device) -> None:
    check(build(device, slots=slots))


def test_only_the_slots_are_written(device: torch.device) -> None:
    arguments = build(device)
    ops.append_kv(**arguments)
    rest = torch.ones(PAGES * PAGE_SIZE, dtype=torch.bool)
    rest[[slot for slot in SLOTS if slot >= 0]] = False
    for name in ("k_cache", "v_cache"):
        assert (arguments[name].flatten(0, 1)[rest] == 3.0).all()
    untouched = build(device, slots=[-1, -1, -1])
    ops.append_kv(**untouched)
    assert (untouched["k_cache"] == 3.0).all()


def test_tokens_without_a_slot_cannot_spoil_the_others(device: torch.device) -> None:
    arguments = build(device)
    clean = copied(arguments)
    for name in ("k", "v"):
        arguments[name][1] = math.nan
    ops.append_kv(**arguments)
    ops.append_kv(**clean)
    for name in ("k_cache", "v_cache"):
        assert_same_bits(arguments[name], clean[name])


@pytest.mark.parametrize("cache_dtype", [torch.int8, E4M3], ids=str)
@pytest.mark.parametrize("scale", ["scalar", "one", "head", "token"])
@pytest.mark.parametrize("layout", ["dense", "strided"])
def test_quantized_caches(
    cache_dtype: torch.dtype, scale: str, layout: str, device: torch.device
) -> None:
    arguments = build(
        device, cache_dtype=cache_dtype, scale=scale, layout=layout, dtype=torch.bfloat16
    )
    expected = copied(arguments)
    ops.append_kv(**arguments)
    reference.append_kv(**expected)
    for cache, scale_name in (("k_cache", "k_scale"), ("v_cache", "v_scale")):
        torch.testing.assert_close(arguments[scale_name], expected[scale_name], rtol=1e-6, atol=0.0)
        # A key on the edge between two steps may fall to either side.
        ours, theirs = arguments[cache].float(), expected[cache].float()
        assert ((ours - theirs).abs() <= theirs.abs().clamp(min=8) / 8).all()
        assert (ours != theirs).sum() <= 2


def test_scales_per_token_are_written_at_the_slots_only(device: torch.device) -> None:
    arguments = build(device, cache_dtype=torch.int8, scale="token", rotary_dim=None)
    ops.append_kv(**arguments)
    scale = arguments["k_scale"].flatten(0, 1)
    for token, slot in enumerate(SLOTS):
        if slot >= 0:
            expected = arguments["k"][token].cpu().abs().amax(-1) / 127
            assert_same_bits(scale[slot].cpu(), expected)
    assert (scale[[1, 2, 4]] == 0.03).all()


@pytest.mark.parametrize("cache_dtype", [torch.int8, E4M3], ids=str)
def test_fixed_scales_saturate(cache_dtype: torch.dtype, device: torch.device) -> None:
    arguments = build(device, cache_dtype=cache_dtype, scale="scalar", rotary_dim=None)
    arguments["k"].fill_(1e30)
    arguments["v"].fill_(-1e30)
    ops.append_kv(**arguments)
    low, high = (-128.0, 127.0) if cache_dtype is torch.int8 else (-448.0, 448.0)
    assert (arguments["k_cache"][0, 0].float() == high).all()
    assert (arguments["v_cache"][0, 0].float() == low).all()


@pytest.mark.parametrize("cache_dtype", [torch.int8, E4M3], ids=str)
@pytest.mark.parametrize("scale", ["scalar", "one", "head"])
@pytest.mark.parametrize("spread", [1, 2])
def test_fixed_scales_are_written_where_asked_for(
    cache_dtype: torch.dtype, scale: str, spread: int, device: torch.device
) -> None:
    arguments = build(device, cache_dtype=cache_dtype, scale=scale)
    plain = copied(arguments)
    for name in ("k_scale", "v_scale"):
        shown = torch.full((PAGES, spread * PAGE_SIZE, HEADS_KV), -7.0, device=device)
        arguments[f"{name}_out"] = shown[:, ::spread]
    ops.append_kv(**arguments)
    ops.append_kv(**plain)
    written = [slot for slot in SLOTS if slot >= 0]
    for part in "kv":
        assert_same_bits(arguments[f"{part}_cache"], plain[f"{part}_cache"])
        shown = arguments[f"{part}_scale_out"].flatten(0, 1)
        expected = torch.full_like(shown, -7.0)
        expected[written] = arguments[f"{part}_scale"].expand(HEADS_KV)
        assert_same_bits(shown, expected)


@pytest.mark.parametrize("cache_dtype", [torch.int8, E4M3], ids=str)
@pytest.mark.parametrize("part", ["k", "v"])
def test_a_nan_shows_in_every_8_bit_cache(
    cache_dtype: torch.dtype, part: str, device: torch.device
) -> None:
    arguments = build(device, cache_dtype=cache_dtype, scale="head")
    shape = (PAGES, PAGE_SIZE, HEADS_KV)
    shown = {f"{name}_scale_out": torch.zeros(shape, device=device) for name in "kv"}
    token = 0
    arguments[part][token, 1, DIM - 1] = math.nan
    ops.append_kv(**arguments, **shown)
    scale = shown[f"{part}_scale_out"].flatten(0, 1)
    code = arguments[f"{part}_cache"].float().flatten(0, 1)[SLOTS[token], 1]
    assert scale[SLOTS[token], 1].isnan() == (cache_dtype is torch.int8)
    assert code.isnan().any() == (cache_dtype is E4M3)
    others = [other for name in shown for other in shown[name].flatten(0, 2).tolist()]
    assert sum(math.isnan(other) for other in others) == (cache_dtype is torch.int8)
    lengths = torch.tensor([SLOTS[token] + 1], dtype=torch.int32, device=device)
    pages = torch.arange(PAGES, dtype=torch.int32, device=device)[None]
    query = torch.ones(1, HEADS_KV, DIM, device=device)
    scales = {name.removesuffix("_out"): tensor for name, tensor in shown.items()}
    caches = (arguments["k_cache"], arguments["v_cache"])
    out = ops.paged_attention(query, *caches, pages, lengths, **scales)
    assert isinstance(out, torch.Tensor)
    assert out[0, 1].isnan().any()
    assert not out[0, 0].isnan().any()
    if SLOTS[token]:
        before = ops.paged_attention(query, *caches, pages, lengths - 1, **scales)
        assert isinstance(before, torch.Tensor)
        assert not before.isnan().any()


def test_without_q_only_the_cache_is_written(device: torch.device) -> None:
    arguments = build(device)
    expected = copied(arguments)
    del arguments["q"]
    assert ops.append_kv(**arguments) is None
    ops.append_kv(**expected)
    assert_same_bits(arguments["k_cache"], expected["k_cache"])


def test_q_out_may_be_q(device: torch.device) -> None:
    arguments = build(device, norm=True)
    expected = ops.append_kv(**copied(arguments))
    returned = ops.append_kv(**arguments, q_out=arguments["q"])
    assert returned is arguments["q"]
    assert expected is not None
    assert_same_bits(returned, expected)


def test_rotation_keeps_the_angle_between_positions(device: torch.device) -> None:
    arguments = build(device, slots=[0, 1])
    inverse = 10000.0 ** (-torch.arange(0, DIM, 2) / DIM)
    angles = torch.outer(torch.arange(40.0), inverse)
    arguments["cos_sin"] = torch.cat([angles.cos(), angles.sin()], dim=1).to(device)
    arguments["q"] = arguments["q"][:1].expand(2, -1, -1)
    arguments["k"] = arguments["k"][:1].expand(2, -1, -1)
    products = []
    for positions in ([5, 9], [30, 34]):
        arguments["positions"] = int32(positions, device)
        q = ops.append_kv(**arguments)
        assert q is not None
        products.append((q[0, 0] * arguments["k_cache"][0, 1, 0]).sum())
    torch.testing.assert_close(products[0], products[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rotary_dim", [None, DIM])
def test_check_bounds_accepts_what_is_right(rotary_dim: int | None, device: torch.device) -> None:
    arguments = build(device, rotary_dim=rotary_dim)
    unchecked = copied(arguments)
    ops.append_kv(**arguments, check_bounds=True)
    ops.append_kv(**unchecked)
    assert_same_bits(arguments["k_cache"], unchecked["k_cache"])


CPU = torch.device("cpu")
BAD = [
    ({"k": None}, TypeError, "k: got NoneType, expected a tensor"),
    ({"k": torch.zeros(7, 3, 16)}, ValueError, r"k: got shape \[7, 3, 16\], expected \[7, 2, 16"),
    ({"k": torch.zeros(7, 2, 8)}, ValueError, "k_cache: got shape"),
    ({"k": torch.zeros(1, 2, 16).expand(2**31, -1, -1)}, ValueError, "k: got tokens = 2147483648"),
    ({"q": torch.zeros(7, 1, 16).expand(-1, 2**31, -1)}, ValueError, "q: got heads_q = 2147483648"),
    ({"q": torch.zeros(7, 1, 16).expand(-1, 262137, -1)}, ValueError, "k: got 262141 heads of k"),
    ({"v": torch.zeros(6, 2, 16)}, ValueError, "v: got shape"),
    ({"v": torch.zeros(7, 2, 16).half()}, TypeError, "v: got dtype torch.float16"),
    ({"k_cache": torch.zeros(4, 0, 2, 16)}, ValueError, "k_cache: got page_size = 0"),
    ({"k_cache": torch.zeros(4, 5, 2, 16).half()}, TypeError, "k_cache: got dtype torch.float16"),
    ({"v_cache": torch.zeros(4, 6, 2, 16)}, ValueError, "v_cache: got shape"),
    ({"slot_mapping": int32(SLOTS, CPU)}, TypeError, "slot_mapping: got dtype torch.int32"),
    ({"slot_mapping": torch.tensor([1])}, ValueError, r"slot_mapping: got shape \[1\]"),
    ({"positions": None}, ValueError, "positions: got None with cos_sin"),
    ({"cos_sin": None}, ValueError, "cos_sin: got None with positions"),
    ({"positions": torch.zeros(7)}, TypeError, "positions: got dtype"),
    ({"cos_sin": torch.zeros(11, 16).half()}, TypeError, "cos_sin: got dtype"),
    ({"cos_sin": torch.zeros(11, 5)}, ValueError, "rotary_dim = 5, expected an even number"),
    ({"cos_sin": torch.zeros(11, 18)}, ValueError, "rotary_dim = 18, expected .* dim = 16"),
    ({"cos_sin": torch.zeros(0, 16)}, ValueError, "cos_sin: got max_positions = 0"),
    ({"cos_sin": torch.zeros(11, 0)}, ValueError, "cos_sin: got rotary_dim = 0"),
    ({"q": torch.zeros(7, 6, 8)}, ValueError, "q: got shape"),
    ({"q": torch.zeros(7, 6, 16).half()}, TypeError, "q: got dtype"),
    ({"q_out": torch.zeros(7, 6, 8)}, ValueError, "q_out: got shape"),
    ({"q": None, "q_out": torch.zeros(7, 6, 16)}, ValueError, "q_out: got a tensor, expected None"),
    ({"q": None, "q_norm_weight": torch.ones(16)}, ValueError, "q_norm_weight: got a tensor"),
    ({"k_norm_weight": torch.ones(8)}, ValueError, "k_norm_weight: got shape"),
    ({"q_norm_weight": torch.ones(16).half()}, TypeError, "q_norm_weight: got dtype"),
    ({"norm_after_rotation": 1}, TypeError, "norm_after_rotation: got int, expected a bool"),
    ({"interleaved": 0}, TypeError, "interleaved: got int, expected a bool"),
    ({"check_bounds": "yes"}, TypeError, "check_bounds: got str, expected a bool"),
    ({"norm_eps": -1.0}, ValueError, "norm_eps: got -1.0"),
    ({"k_scale": torch.ones(2)}, ValueError, "k_scale: got a tensor, expected None"),
    ({"stream": 1}, ValueError, "stream: got 1"),
    (
        {"slot_mapping": torch.tensor([0, 1, 2, 3, 4, 5, 20])},
        ValueError,
        "slot_mapping: got 20 for token 6, expected -1 to 19",
    ),
    (
        {"slot_mapping": torch.tensor([0, -2, 2, 3, 4, 5, 6])},
        ValueError,
        "slot_mapping: got -2 for token 1",
    ),
    (
        {"slot_mapping": torch.tensor([0, 1, 2, -1, -1, 1, 6])},
        ValueError,
        "slot_mapping: got 1 for 2 tokens, expected no slot twice",
    ),
    (
        {"positions": int32([0, 0, 0, 0, 11, 0, 0], CPU)},
        ValueError,
        "positions: got 11 for token 4, expected 0 to 10",
    ),
    (
        {"positions": int32([0, 0, 0, 0, -1, 0, 0], CPU)},
        ValueError,
        "positions: got -1 for token 4",
    ),
    ({"q_out": torch.zeros(7, 1, 16).expand(7, 6, 16)}, ValueError, "q_out: got strides"),
    (
        {"k_cache": torch.full((1, 5, 2, 16), 3.0).expand(4, 5, 2, 16)},
        ValueError,
        r"k_cache: got strides \[0, 32, 16, 1\] for shape \[4, 5, 2, 16\], expected elements",
    ),
    (
        {"v_cache": torch.full((4, 5, 1, 16), 3.0).expand(4, 5, 2, 16)},
        ValueError,
        "v_cache: got strides",
    ),
]


@pytest.mark.parametrize(("changes", "error", "match"), BAD, ids=[row[2] for row in BAD])
@pytest.mark.parametrize("check_bounds", [False, True])
def test_bad_input(
    changes: dict[str, Any], error: type[Exception], match: str, check_bounds: bool
) -> None:
    arguments = build(CPU)
    q = arguments["q"].clone()
    if "q" not in changes:
        arguments["q_out"] = arguments["q"]
    arguments |= changes
    with pytest.raises(error, match=match):
        ops.append_kv(**{"check_bounds": check_bounds, **arguments})
    for name in ("k_cache", "v_cache"):
        assert name in changes or (arguments[name] == 3.0).all()
    assert "q" in changes or torch.equal(arguments["q"], q)


@pytest.mark.parametrize("name", ["q_out", "k_cache", "v_cache"])
def test_what_only_inference_mode_may_write_is_refused_before_anything_is_written(
    name: str,
) -> None:
    arguments = build(CPU)
    arguments["q_out"] = torch.zeros_like(arguments["q"])
    with torch.inference_mode():
        arguments[name] = arguments[name].clone()
    before = copied(arguments)
    with pytest.raises(ValueError, match=f"{name}: got a tensor made in torch.inference_mode"):
        ops.append_kv(**arguments)
    for kept in ("q_out", "k_cache", "v_cache"):
        assert_same_bits(arguments[kept], before[kept])
    with torch.inference_mode():
        ops.append_kv(**arguments)


@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
def test_scales_that_are_written_must_not_be_expanded(name: str) -> None:
    arguments = build(CPU, cache_dtype=torch.int8, scale="token")
    arguments[name] = torch.ones(1, PAGE_SIZE, HEADS_KV).expand(PAGES, PAGE_SIZE, HEADS_KV)
    with pytest.raises(ValueError, match=f"{name}: got strides"):
        ops.append_kv(**arguments)
    assert (arguments["k_cache"] == 3).all()


@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
@pytest.mark.parametrize(
    ("scale", "written", "match"),
    [
        (None, torch.zeros(PAGES, PAGE_SIZE, HEADS_KV), "got a tensor, expected None without a"),
        ("token", torch.zeros(PAGES, PAGE_SIZE, HEADS_KV), "got a tensor, expected None beside"),
        ("head", torch.zeros(PAGES, HEADS_KV), r"got shape \[4, 2\]"),
        ("head", torch.zeros(PAGES, PAGE_SIZE, HEADS_KV).half(), "got dtype torch.float16"),
        ("head", torch.zeros(1, 1, 1).expand(PAGES, PAGE_SIZE, HEADS_KV), "got strides"),
    ],
    ids=str,
)
def test_written_scales_that_do_not_fit_are_named(
    name: str, scale: str | None, written: torch.Tensor, match: str
) -> None:
    arguments = build(CPU, cache_dtype=None if scale is None else torch.int8, scale=scale)
    with pytest.raises((TypeError, ValueError), match=f"{name}_out: {match}"):
        ops.append_kv(**arguments, **{f"{name}_out": written})
    assert (arguments["k_cache"] == 3).all()


@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
def test_a_quantized_cache_needs_scales(name: str) -> None:
    arguments = build(CPU, cache_dtype=torch.int8, scale="head")
    del arguments[name]
    with pytest.raises(ValueError, match=f"{name}: got None"):
        ops.append_kv(**arguments)


@pytest.mark.parametrize("dtype", [torch.int8, E4M3], ids=str)
def test_scales_by_token_may_have_any_strides(dtype: torch.dtype, device: torch.device) -> None:
    k, v = (torch.randn(5, 2, 16, device=device) for _ in range(2))
    slots = torch.tensor([3, 9, -1, 0, 7], device=device)
    caches = [torch.zeros(3, 4, 2, 16, device=device).to(dtype) for _ in range(4)]
    both = torch.zeros(3, 4, 2, 3, device=device)
    dense = [torch.zeros(3, 4, 2, device=device) for _ in range(2)]
    ops.append_kv(k, v, *caches[:2], slots, k_scale=both[..., 0], v_scale=both[..., 2])
    ops.append_kv(k, v, *caches[2:], slots, k_scale=dense[0], v_scale=dense[1])
    written = (*caches[:2], both[..., 0], both[..., 2])
    for got, expected in zip(written, (*caches[2:], *dense), strict=True):
        assert_same_bits(got.contiguous(), expected)
    assert (both[..., 1] == 0).all()
