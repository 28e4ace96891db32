"""Products of the rows of each expert."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from moe_cases import FORMATS, operands, routing, whole_blocks
from ops_cases import E4M3, FLOATS, assert_same_bits, int32

from ostinato import ops
from ostinato.ops import reference
from ostinato.ops.moe.moe_linear_cuda import (
    MoeLinear,
    in_pairs,
    quantizes_rows,
    tile_channels,
)
from ostinato.ops.moe.moe_linear_torch import multiply_slot_by_slot
from ostinato.ops.moe.plan import tile_tokens_for


def expected_of(
    x: torch.Tensor, w: torch.Tensor, plan: ops.MoePlan, dtype: torch.dtype, **options: Any
) -> torch.Tensor:
    on_cpu = {k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    here = ops.MoePlan(*(p.cpu() if isinstance(p, torch.Tensor) else p for p in plan))
    return reference.moe_linear(x.cpu(), w.cpu(), here, dtype=dtype, **on_cpu)


def assert_near(got: torch.Tensor, exact: torch.Tensor, k: int) -> None:
    """Demand the rounding to the output's dtype and that of fp32 sums of k products."""
    error = (got.double().cpu() - exact).abs()
    # Products of 1/sqrt(k) weights, or of scaled codes: sums of about 1.
    slack = 8 * torch.finfo(torch.float32).eps * k**0.5 * exact.abs().amax().clamp(min=1)
    assert (error <= torch.finfo(got.dtype).eps / 2 * exact.abs() * 1.01 + slack).all()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("to", ["experts", "slots"])
@pytest.mark.parametrize("activation", [None, "silu_mul"])
@pytest.mark.parametrize("form", FORMATS)
def test_each_format_as_its_twin(form: str, activation: str | None, to: str, packed: bool) -> None:
    device = torch.device("cpu")
    tokens, experts, top_k, k = 5, 6, 2, 200
    n = whole_blocks(form, 48, gated=activation is not None)
    plan = routing(tokens, experts, top_k, device)
    rows = tokens if to == "experts" else tokens * top_k
    x, w, scales = operands(form, rows, experts, n, k, device)
    weight = ops.pack_experts(w, gated=activation is not None) if packed else w
    options: dict[str, Any] = {"to": to, "activation": activation, **scales}
    exact = expected_of(x, w, plan, torch.float64, **options)
    out_dtypes = FLOATS if x.itemsize == 1 else (x.dtype, torch.float32)
    for out_dtype in out_dtypes:
        got = ops.moe_linear(x, weight, plan, out_dtype=out_dtype, **options)
        assert got.dtype is out_dtype
        assert_near(got, exact, k)


@pytest.mark.parametrize("to", ["experts", "slots"])
@pytest.mark.parametrize("form", ["int8", "e4m3", "block", "block128"])
def test_wide_rows_are_quantised_first(form: str, to: str, device: torch.device) -> None:
    """With the bits of the ops that quantise; rows without an expert may be anything."""
    tokens, experts, top_k, n, k = 5, 6, 2, 48, 200
    plan = ops.moe_route(
        torch.randn(tokens, experts).to(device), top_k, n_active=int32([4], device)
    )
    rows = tokens if to == "experts" else tokens * top_k
    codes, w, scales = operands(form, rows, experts, n, k, device)
    groups = form in ("block", "block128")
    for dtype, early, power_of_two in (
        (torch.bfloat16, True, False),
        (torch.float16, False, groups),
        (torch.float32, True, groups),
    ):
        x = torch.randn(rows, k).to(device, dtype)
        x[-1] = math.nan if to == "slots" else 0
        if groups:
            codes, x_scale = ops.quantize_per_group(x, power_of_two=power_of_two)
        else:
            codes, x_scale = ops.quantize_per_token(x, w.dtype)
        options: dict[str, Any] = {"to": to, "w_scale": scales["w_scale"], "out_dtype": dtype}
        shape = (rows, n) if to == "slots" else (tokens * top_k, n)
        want, got = (torch.full(shape, 7.0, dtype=dtype, device=device) for _ in range(2))
        outs = [t.view(tokens, top_k, n) if to == "slots" else t for t in (want, got)]
        ops.moe_linear(codes, w, plan, x_scale=x_scale, out=outs[0], **options)
        more: dict[str, Any] = {"early": early, "power_of_two": power_of_two}
        more["n_active"] = None if to == "experts" else plan.n_rows
        ops.moe_linear(x, ops.pack_experts(w), plan, out=outs[1], **options, **more)
        assert_same_bits(got, want)
        assert ops.moe_linear(x, w, plan, to=to, w_scale=scales["w_scale"]).dtype is dtype


def test_wide_rows_as_the_twin() -> None:
    device = torch.device("cpu")
    plan = routing(5, 6, 2, device)
    for form in ("int8", "e4m3", "block", "block128"):
        _, w, scales = operands(form, 10, 6, 48, 200, device)
        x = torch.randn(10, 200)
        for power_of_two in (False, True)[: 1 + form.startswith("block")]:
            options: dict[str, Any] = {"to": "slots", "w_scale": scales["w_scale"]}
            options["power_of_two"] = power_of_two
            exact = expected_of(x, w, plan, torch.float64, **options)
            assert_near(ops.moe_linear(x, w, plan, **options), exact, 200)


def test_when_the_product_quantises_rows() -> None:
    """Few rows of an expert, whole vectors, and results like x."""
    x = torch.zeros(8, 2048, dtype=torch.bfloat16)
    of_tokens = {tokens: (8 * tokens, 128, tile_tokens_for(8 * tokens, 128)) for tokens in (32, 33)}
    assert quantizes_rows(x, torch.bfloat16, *of_tokens[32])
    assert not quantizes_rows(x, torch.bfloat16, *of_tokens[33])
    assert quantizes_rows(x, torch.bfloat16, 16, 8, 8)
    assert not quantizes_rows(x, torch.bfloat16, 17, 8, 8)
    assert not quantizes_rows(x, torch.bfloat16, 16, 8, 16)
    for given, out_dtype in (
        (x, torch.float32),
        (x.float(), torch.float32),
        (x[:, :2044], torch.bfloat16),
        (torch.zeros(1, 2056).half(), torch.float16),
    ):
        assert not quantizes_rows(given, out_dtype, *of_tokens[32])


def test_dtype_of_the_result_by_default() -> None:
    plan = routing(2, 4, 1, torch.device("cpu"))
    for form, dtype in (("int8", torch.bfloat16), ("fp16", torch.float16)):
        x, w, scales = operands(form, 2, 4, 8, 16, torch.device("cpu"))
        assert ops.moe_linear(x, w, plan, to="experts", **scales).dtype is dtype


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("kind", ["random", "one"])
def test_a_row_has_the_same_bits_in_every_batch(form: str, kind: str) -> None:
    """Alone, beside others, and beside padding that goes to no expert."""
    device = torch.device("cpu")
    tokens, experts, top_k, n, k = 19, 8, 3, 24, 160
    logits = torch.randn(tokens, experts)
    if kind == "one":
        logits[:, :3] += 50
    x, w, scales = operands(form, tokens, experts, n, k, device)

    def block(start: int, stop: int, active: int) -> torch.Tensor:
        plan = ops.moe_route(logits[start:stop], top_k, n_active=int32([active], device))
        options = dict(scales)
        if scales:
            options["x_scale"] = scales["x_scale"][..., start:stop]
        y = ops.moe_linear(x[start:stop], w, plan, to="experts", **options)
        # Rows are sorted by expert: back to slots.
        slots = torch.empty_like(y)
        slots[plan.rows.long()] = y
        return slots.view(stop - start, top_k, n)[:active]

    whole = block(0, tokens, tokens)
    assert_same_bits(block(0, tokens, 7), whole[:7])
    for start, stop in ((0, 1), (4, 6), (3, 19)):
        assert_same_bits(block(start, stop, stop - start), whole[start:stop])


def test_what_has_no_expert_is_not_written() -> None:
    device = torch.device("cpu")
    logits = torch.randn(6, 4)
    logits[2] = math.nan
    plan = ops.moe_route(logits, 2, n_active=int32([5], device))
    x, w, _ = operands("bf16", 6, 4, 8, 16, device)
    out = torch.full((12, 8), 7.0, dtype=torch.bfloat16)
    ops.moe_linear(x, w, plan, to="experts", out=out)
    assert (out[8:] == 7).all()
    assert (out[:8] != 7).any(1).all()
    slots = torch.full((6, 2, 8), 7.0, dtype=torch.bfloat16)
    rows = torch.full((12, 16), math.nan, dtype=torch.bfloat16)
    rows[:8] = 1
    ops.moe_linear(rows, w, plan, to="slots", out=slots)
    assert (slots[[2, 5]] == 7).all()
    assert slots.isfinite().all()


def test_weights_of_unchosen_experts_may_be_anything() -> None:
    device = torch.device("cpu")
    plan = routing(4, 8, 2, device, kind="one")
    x, w, _ = operands("bf16", 4, 8, 8, 16, device)
    w[2:] = math.nan
    assert ops.moe_linear(x, w, plan, to="experts").isfinite().all()


@pytest.mark.parametrize("n", [2, 16, 24, 40])
@pytest.mark.parametrize("dtype", [torch.int8, E4M3, torch.bfloat16], ids=str)
def test_packing_and_back(n: int, dtype: torch.dtype) -> None:
    w = torch.randint(-100, 100, (3, n, 70)).to(dtype)
    for gated in (False, True):
        packed = ops.pack_experts(w, gated=gated)
        assert packed.shape == w.shape
        assert_same_bits(packed.unpack(), w)


def test_a_gated_tile_has_both_halves() -> None:
    """Channels 8 to 15 of the gate and of up are the second tile."""
    w = torch.arange(32, dtype=torch.int8).view(1, 32, 1).expand(1, 32, 64)
    packed = ops.pack_experts(w, gated=True)
    assert packed.data[1, 0, :, 0].tolist() == [*range(8, 16), *range(24, 32)]


PLAN = routing(2, 4, 2, torch.device("cpu"))
X, W, SCALES = operands("e4m3", 2, 4, 16, 32, torch.device("cpu"))
ROWS = operands("block", 2, 4, 24, 300, torch.device("cpu"))
NO_SCALES = {"x_scale": None, "w_scale": None}
WIDE = operands("block128", 2, 4, 384, 300, torch.device("cpu"))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x": X[:1]}, ValueError, "x: got 1 rows, expected 2, those of a plan for 2 tokens"),
        ({"to": "slots"}, ValueError, "x: got 2 rows, expected 4"),
        ({"to": "tokens"}, ValueError, "to: got 'tokens', expected 'experts' or 'slots'"),
        ({"x": X.double()}, TypeError, "x: got dtype torch.float64"),
        ({"x": X.float()}, ValueError, "x_scale: got a tensor, expected None for x of torch.floa"),
        ({"x": X.half(), **NO_SCALES}, ValueError, "w_scale: got None, expected a tensor for tor"),
        ({"x": X.half(), "x_scale": None, "w": W.float()}, TypeError, "w: got dtype torch.float32"),
        ({"power_of_two": 1}, TypeError, "power_of_two: got int"),
        ({"n_active": torch.ones(1)}, TypeError, "n_active: got dtype torch.float32"),
        ({"power_of_two": True}, ValueError, "power_of_two: got True, expected False where x is"),
        (
            {"x": X.half(), "x_scale": None, "power_of_two": True},
            ValueError,
            "power_of_two: got True, expected False where x is not quantised by groups",
        ),
        ({"w": W[:3]}, ValueError, r"w: got shape \[3, 16, 32\], expected \[4, N, 32\]"),
        ({"w": W.view(torch.int8)}, TypeError, "w: got dtype torch.int8"),
        ({"w": ops.pack_experts(W[:, :, :31])}, ValueError, r"w: got shape \[4, 16, 31\]"),
        ({"w": ops.pack_experts(W, gated=True)}, ValueError, "w: got gated = True, expected Fa"),
        ({"activation": "gelu"}, ValueError, "activation: got 'gelu'"),
        ({"activation": "silu_mul", "w": W[:, :15]}, ValueError, "w: got N = 15, expected an"),
        ({"x_scale": None}, ValueError, "x_scale: got None, expected a tensor for"),
        ({"w_scale": torch.ones(4, 15)}, ValueError, r"w_scale: got shape \[4, 15\]"),
        ({"plan": PLAN.ids}, TypeError, "plan: got Tensor, expected a MoePlan"),
        ({"plan": PLAN._replace(tile_tokens=24)}, ValueError, "plan.tile_tokens: got 24"),
        ({"plan": PLAN._replace(rows=PLAN.rows[:3])}, ValueError, r"plan.rows: got shape \[3\]"),
        ({"early": 1}, TypeError, "early: got int"),
        ({"out_dtype": torch.int8}, TypeError, "out_dtype: got torch.int8"),
        ({"out": torch.empty(4, 15).bfloat16()}, ValueError, r"out: got shape \[4, 15\]"),
        (
            {"x": ROWS[0], "w": ROWS[1], **ROWS[2], "activation": "silu_mul"},
            ValueError,
            "w: got 12 channels of the gate with scales of blocks, expected a multiple of 8",
        ),
        (
            {"x": WIDE[0], "w": WIDE[1], **WIDE[2], "activation": "silu_mul"},
            ValueError,
            "w: got 192 channels of the gate with scales of blocks, expected a multiple of 128",
        ),
        (
            {"x": ROWS[0], "w": ROWS[1], **ROWS[2], "w_scale": torch.ones(4, 3, 2)},
            ValueError,
            r"w_scale: got shape \[4, 3, 2\], expected \[4, 3, 3\] or \[4, 3, 1\]",
        ),
        (
            {"x": torch.ones(2, 32).bfloat16(), "w": torch.ones(4, 16, 32).bfloat16()},
            ValueError,
            "x_scale: got a tensor, expected None",
        ),
    ],
)
def test_bad_arguments_are_named(
    change: dict[str, Any], error: type[Exception], message: str
) -> None:
    arguments: dict[str, Any] = {"x": X, "w": W, "plan": PLAN, "to": "experts", **SCALES} | change
    with pytest.raises(error, match=message):
        ops.moe_linear(**arguments)


def test_bad_experts_are_named() -> None:
    with pytest.raises(ValueError, match=r"w: got 15 channels, expected an even number"):
        ops.pack_experts(W[:, :15], gated=True)
    with pytest.raises(ValueError, match=r"w: got shape \[16, 32\]"):
        ops.pack_experts(W[0])
    with pytest.raises(ValueError, match="w: got experts = 0"):
        ops.pack_experts(W[:0])
    with pytest.raises(ValueError, match=r"data: got shape"):
        ops.PackedExperts(ops.pack_experts(W).data, 4, 17, 32)


@pytest.mark.parametrize("to", ["experts", "slots"])
@pytest.mark.parametrize("activation", [None, "silu_mul"])
@pytest.mark.parametrize("form", FORMATS)
def test_the_way_of_gpus_without_a_kernel(form: str, activation: str | None, to: str) -> None:
    """Row by row, by copies of weights: the same, and nothing for slots without an expert."""
    device = torch.device("cpu")
    tokens, experts, top_k, k = 5, 6, 2, 200
    n = whole_blocks(form, 48, gated=activation is not None)
    logits = torch.randn(tokens, experts)
    logits[1] = math.nan
    plan = ops.moe_route(logits, top_k)
    rows = tokens if to == "experts" else tokens * top_k
    x, w, scales = operands(form, rows, experts, n, k, device)
    options: dict[str, Any] = {"to": to, "activation": activation, **scales}
    exact = expected_of(x, w, plan, torch.float64, **options).flatten(0, -2)
    out = torch.full(exact.shape, 7.0)
    given = (scales.get("x_scale"), scales.get("w_scale"), to == "experts", bool(activation))
    multiply_slot_by_slot(x, w, *given, plan.ids.flatten(), plan.rows, top_k, out)
    there = torch.zeros(len(out), dtype=torch.bool)
    used = int(plan.n_rows)
    there[:used] = to == "experts"
    there[plan.rows[:used].long()] |= to == "slots"
    assert_near(out[there], exact[there], k)
    assert (out[~there] == 7).all()


def test_tiles_are_cut_where_that_spreads_the_reads_of_weights() -> None:
    few = MoeLinear(dtype="int8", out_dtype="bf16", tokens=8)
    # 8 rows of an expert: 8 tiles of 96 x 16 channels on 132 SMs, in one round of 6 or in two.
    assert tile_channels(few, 132, 8, 96) == 96
    assert tile_channels(few, 132, 1, 2048) == 128
    many = MoeLinear(dtype="int8", out_dtype="bf16", tokens=128)
    # A CTA would read fewer weights in 34 rounds of 224 channels, but its MMAs are of 256.
    assert tile_channels(many, 132, 640, 96) == 256


def test_ctas_share_weights_in_large_tiles_of_long_rows() -> None:
    qwen, mixtral = (2048 * 8, 128), (2048 * 2, 8)
    assert in_pairs(128, *qwen, 2048)
    assert in_pairs(128, *mixtral, 14336)
    assert not in_pairs(128, *qwen, 768)  # its down product
    assert in_pairs(128, *qwen, 2 * 768)  # of 16 bits
    assert not in_pairs(128, 1024 * 8, 128, 2048)  # half a tile for each expert
    assert not in_pairs(64, *qwen, 2048)
