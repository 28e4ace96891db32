"""A mixture of experts by our kernels, on a GPU: every tile, tails, routings, and under capture."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from moe_cases import FORMATS, operands, routing, whole_blocks
from ops_cases import assert_same_bits, int32

from ostinato import ops
from ostinato.ops.common.pdl import pdl
from ostinato.ops.linear.precompile import precompile
from ostinato.ops.moe.moe_linear_cuda import MOE_LINEAR
from ostinato.ops.moe.moe_linear_torch import multiply_slot_by_slot
from ostinato.ops.moe.plan import TILE_TOKENS, MoePlan

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("moe_kernels")]

CUDA = torch.device("cuda")
# (tokens, experts, top_k) of each size of a token tile; the last also in pairs of CTAs.
ROUTINGS = ((1, 8, 2), (16, 8, 3), (30, 6, 2), (40, 4, 3), (340, 5, 2))
# (N, K), gated: every tail of either.
SIZES = ((16, 128), (48, 72), (272, 528), (528, 2048), (1536, 200))


@pytest.fixture(scope="session")
def moe_kernels() -> None:
    """Have what these tests launch compiled side by side before the first of them."""
    precompile([v for v in MOE_LINEAR if v.out_dtype in ("bf16", "fp32") and not v.x_dtype])


def exact_of(
    x: torch.Tensor,
    w: torch.Tensor,
    plan: MoePlan,
    *,
    to: str,
    activation: str | None,
    x_scale: torch.Tensor | None = None,
    w_scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return results in fp64, the magnitudes that were added, and which elements there are."""
    wide_x, wide_w = x.double(), w.double()
    if x_scale is not None and w_scale is not None:
        if w_scale.dim() == 3:
            k = x.size(1)
            wide_x *= x_scale.t().repeat_interleave(128, 1)[:, :k]
            shared = 8 if w_scale.size(2) == -(-w.size(1) // 8) else 128
            of_w = w_scale.repeat_interleave(128, 1)[:, :k].repeat_interleave(shared, 2)
            wide_w *= of_w[:, :, : w.size(1)].mT
        else:
            wide_x *= x_scale.unsqueeze(1)
            wide_w *= w_scale.unsqueeze(2)
    width = w.size(1) // (1 if activation is None else 2)
    out, size = (torch.zeros(plan.rows.size(0), width, device=CUDA).double() for _ in range(2))
    there = torch.zeros(plan.rows.size(0), 1, dtype=torch.bool, device=CUDA)
    for expert in range(plan.experts):
        first, stop = plan.offsets[expert : expert + 2].tolist()
        slots = plan.rows[first:stop].long()
        rows = wide_x[slots // plan.top_k] if to == "experts" else wide_x[first:stop]
        y, sizes = rows @ wide_w[expert].t(), rows.abs() @ wide_w[expert].abs().t()
        if activation is not None:
            (gate, up), (gate_size, up_size) = y.chunk(2, 1), sizes.chunk(2, 1)
            y = torch.nn.functional.silu(gate) * up
            sizes = gate_size * (1 + up.abs()) + up_size * (1 + gate.abs())
        at = torch.arange(first, stop, device=CUDA) if to == "experts" else slots
        out[at], size[at], there[at] = y, sizes, True
    return out, size, there


def check(got: torch.Tensor, form: str, expected: tuple[torch.Tensor, ...]) -> None:
    """Demand one rounding, and the bound of sums: tensor cores keep 13 fraction bits of FP8."""
    exact, sizes, there = expected
    got = got.flatten(0, -2)
    bounds = {"int8": 2.0**-22, "e4m3": 2.0**-11, "block": 2.0**-12, "block128": 2.0**-12}
    bound = bounds.get(form, 2.0**-18)
    rounding = torch.finfo(got.dtype).eps * exact.abs()
    error = (got.double() - exact).abs()
    assert (error <= rounding + bound * sizes + 1e-7)[there.expand_as(error)].all()
    assert (got == 7)[~there.expand_as(error)].all()


@pytest.mark.parametrize("shape", ROUTINGS, ids=str)
@pytest.mark.parametrize("activation", [None, "silu_mul"])
@pytest.mark.parametrize("to", ["experts", "slots"])
@pytest.mark.parametrize("form", FORMATS)
def test_every_tile_and_tail(
    form: str, to: str, activation: str | None, shape: tuple[int, int, int]
) -> None:
    tokens, experts, top_k = shape
    for number, (size, k) in enumerate(SIZES):
        n = whole_blocks(form, size, gated=activation is not None)
        logits = torch.randn(tokens, experts)
        if tokens > 2:
            logits[1, 0] = math.nan
        plan = ops.moe_route(logits.to(CUDA), top_k, n_active=int32([tokens], CUDA))
        rows = tokens if to == "experts" else tokens * top_k
        x, w, scales = operands(form, rows, experts, n, k, CUDA)
        out_dtype = torch.float32 if number % 2 else x.dtype if x.itemsize > 1 else torch.bfloat16
        width = n if activation is None else n // 2
        # Nothing aligns the second half of them.
        storage = torch.full((tokens * top_k + 2, width + 3 * (number % 2)), 7.0).to(CUDA)
        out = storage.to(out_dtype)[1:-1, :width]
        if to == "slots":
            out = out.unflatten(0, (tokens, top_k))
        weight = ops.pack_experts(w, gated=activation is not None)
        got = ops.moe_linear(
            x, weight, plan, to=to, activation=activation, out_dtype=out_dtype, out=out, **scales
        )
        check(got, form, exact_of(x, w, plan, to=to, activation=activation, **scales))


def test_the_routings_have_every_tile() -> None:
    tiles = {routing(*shape, CUDA).tile_tokens for shape in ROUTINGS}
    assert tiles == set(TILE_TOKENS)


def slots_of(y: torch.Tensor, plan: MoePlan) -> torch.Tensor:
    """Return the rows of experts in the order of slots."""
    slots = torch.zeros_like(y)
    used = int(plan.n_rows)
    slots[plan.rows[:used].long()] = y[:used]
    return slots.view(plan.tokens, plan.top_k, -1)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("kind", ["random", "one"])
def test_a_row_has_the_same_bits_in_every_tile(form: str, kind: str) -> None:
    tokens, experts, top_k, k = 700, 8, 3, 1040
    n = whole_blocks(form, 272, gated=True)
    logits = torch.randn(tokens, experts).to(CUDA)
    if kind == "one":
        logits[:, 2:5] += 50
    x, w, scales = operands(form, tokens, experts, n, k, CUDA)
    weight = ops.pack_experts(w, gated=True)

    def rows(start: int, stop: int, active: int) -> torch.Tensor:
        plan = ops.moe_route(logits[start:stop], top_k, n_active=int32([active], CUDA))
        options: dict[str, Any] = dict(scales)
        if scales:
            options["x_scale"] = scales["x_scale"][..., start:stop].contiguous()
        y = ops.moe_linear(
            x[start:stop], weight, plan, to="experts", activation="silu_mul", **options
        )
        return slots_of(y, plan)[:active]

    whole = rows(0, tokens, tokens)
    for start, stop in ((0, 1), (5, 9), (3, 30), (1, 61), (0, 200)):
        assert_same_bits(rows(start, stop, stop - start), whole[start:stop])
    assert_same_bits(rows(0, 64, 33), whole[:33])


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("tokens", [1, 16, 256])
def test_one_graph_serves_every_routing(form: str, tokens: int) -> None:
    """Random, skewed and all-to-one routings, NaN, padding and no token at all, replayed."""
    experts, top_k, width, inner = 16, 4, 256, 128
    x, gate_up, first = operands(form, tokens, experts, 2 * inner, width, CUDA)
    _, down, second = operands(form, tokens * top_k, experts, width, inner, CUDA)
    packed = (ops.pack_experts(gate_up, gated=True), ops.pack_experts(down))
    logits, active = torch.randn(tokens, experts, device=CUDA), int32([tokens], CUDA)
    residual = torch.randn(tokens, width, device=CUDA).bfloat16()
    norm_weight = torch.randn(width, device=CUDA)
    out_dtype = x.dtype if x.itemsize > 1 else torch.bfloat16

    def step() -> list[torch.Tensor]:
        plan = ops.moe_route(logits, top_k, renormalize=True, n_active=active)
        h = ops.moe_linear(x, packed[0], plan, to="experts", activation="silu_mul", **first)
        options: dict[str, Any] = {}
        if form in ("block", "block128"):
            h, scale = ops.quantize_per_group(h, n_active=plan.n_rows)
            options = {"x_scale": scale, "w_scale": second["w_scale"]}
        elif first:
            h, scale = ops.quantize_per_token(h, x.dtype, n_active=plan.n_rows)
            options = {"x_scale": scale, "w_scale": second["w_scale"]}
        y = ops.moe_linear(
            h, packed[1], plan, to="slots", out_dtype=out_dtype, early=True, **options
        )
        combined = ops.moe_combine(
            y, plan, residual=residual.to(out_dtype), norm_weight=norm_weight, quantize=torch.int8
        )
        return [plan.ids, plan.weights, *(t for t in combined if t is not None)]

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    for replay in range(200):
        logits.normal_()
        if replay % 4 == 1:
            logits[:, replay % experts] += 4
        elif replay % 4 == 2:
            logits[:, :top_k] += 50
        if replay % 7 == 3:
            logits[replay % tokens, replay % experts] = math.nan
        active.fill_(tokens if replay % 3 else replay % (tokens + 1))
        x.view(torch.int8).copy_(x.view(torch.int8).flip(0))
        graph.replay()
        with pdl(False):
            expected = step()
        for got, want in zip(found, expected, strict=True):
            assert_same_bits(got, want)
    first_bits = [t.clone() for t in found]
    for _ in range(10_000 if tokens == 16 else 500):
        graph.replay()
    for got, want in zip(found, first_bits, strict=True):
        assert_same_bits(got, want)


def test_torch_operators_agree_where_there_is_no_kernel() -> None:
    plan = routing(9, 8, 3, CUDA)
    for form in FORMATS:
        x, w, scales = operands(form, 9, 8, whole_blocks(form, 48, gated=True), 200, CUDA)
        dtype = torch.float32
        got = ops.moe_linear(
            x, w, plan, to="experts", activation="silu_mul", out_dtype=dtype, **scales
        )
        out = torch.empty_like(got)
        given = (scales.get("x_scale"), scales.get("w_scale"), True, True)
        multiply_slot_by_slot(x, w, *given, plan.ids.flatten(), plan.rows, 3, out)
        torch.testing.assert_close(got, out, rtol=2e-3, atol=2e-3)


def test_memory_beyond_2_31_elements() -> None:
    """Experts whose weights, and rows whose results, lie that far apart."""
    experts, n, k = 40, 7168, 8192
    assert experts * n * k > 2**31
    w = torch.empty(experts, n, k, dtype=torch.int8, device=CUDA)
    for expert in range(experts):
        w[expert] = torch.randint(-3, 4, (n, k), dtype=torch.int8, device=CUDA)
    packed = ops.pack_experts(w)
    logits = torch.full((2, experts), -9.0, device=CUDA)
    logits[0, 39], logits[1, 38] = 9.0, 9.0
    plan = ops.moe_route(logits, 1)
    x = torch.randint(-3, 4, (2, k), dtype=torch.int8, device=CUDA)
    scales = {"x_scale": torch.ones(2, device=CUDA), "w_scale": torch.ones(experts, n).to(CUDA)}
    got = ops.moe_linear(x, packed, plan, to="experts", out_dtype=torch.float32, **scales)
    assert torch.equal(got[1], (w[39].double() @ x[0].double()).float())
    assert torch.equal(got[0], (w[38].double() @ x[1].double()).float())
