"""Grouped products that quantise rows of x, on a GPU: the bits of a launch that does so before."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from moe_cases import operands, routing
from ops_cases import assert_same_bits, int32

from ostinato import ops
from ostinato.ops.common.pdl import pdl
from ostinato.ops.linear.precompile import precompile
from ostinato.ops.moe import moe_linear_cuda
from ostinato.ops.moe.moe_linear_cuda import MOE_LINEAR, QUANTIZED_TILE, quantizes_rows

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("quantizing_kernels")]

CUDA = torch.device("cuda")
FORMS = ("int8", "e4m3", "block", "block128")
# (tokens, experts, top_k) of tiles of 8 rows, with fewer and more than the product is given.
ROUTINGS = ((1, 8, 2), (30, 32, 3), (10, 8, 3), (32, 128, 8))
# (N, K): every tail of either.
SIZES = ((16, 128), (48, 72), (272, 528), (528, 2048), (130, 200), (256, 8))


@pytest.fixture(scope="session")
def quantizing_kernels() -> None:
    """Have what these tests launch compiled side by side before the first of them."""
    few = [v for v in MOE_LINEAR if v.tokens == QUANTIZED_TILE]
    precompile([v for v in few if v.x_dtype or v.out_dtype in ("bf16", "fp16")])


@pytest.fixture
def in_product(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return what makes the products quantise rows of every tile that they can, or of none."""

    def choose(on: bool) -> None:
        monkeypatch.setattr(moe_linear_cuda, "QUANTIZED_ROWS", QUANTIZED_TILE * on)

    return choose


def rows_of(count: int, k: int, dtype: torch.dtype) -> torch.Tensor:
    """Return rows of which some are zero, tiny, large or hold a NaN, apart in memory."""
    x = torch.randn(count, k)
    x *= torch.tensor([1, 1, 30, 1e-3, 1e-30, 2e-39, 0]).repeat(count)[:count, None]
    if count > 9:
        x[9, k // 2] = math.nan
        x[8, 0] = math.inf
    return torch.nn.functional.pad(x, (0, 8), value=math.nan).to(CUDA, dtype)[:, :k]


@pytest.mark.parametrize("shape", ROUTINGS, ids=str)
@pytest.mark.parametrize("to", ["experts", "slots"])
@pytest.mark.parametrize("form", FORMS)
def test_every_tile_and_tail(
    in_product: Any, form: str, to: str, shape: tuple[int, int, int]
) -> None:
    tokens, experts, top_k = shape
    for number, (n, k) in enumerate(SIZES):
        plan = routing(tokens, experts, top_k, CUDA, kind=("random", "skewed", "one")[number % 3])
        assert plan.tile_tokens == QUANTIZED_TILE
        rows = tokens if to == "experts" else tokens * top_k
        _, w, scales = operands(form, rows, experts, n, k, CUDA)
        x = rows_of(rows, k, torch.float16 if number % 2 else torch.bfloat16)
        w, options = ops.pack_experts(w), {"to": to, "w_scale": scales["w_scale"]}
        for power_of_two in (False, True)[: 1 + form.startswith("block")]:
            found = []
            for on in (False, True):
                in_product(on)
                shape_of = (tokens * top_k, n) if to == "experts" else (tokens, top_k, n)
                out = torch.full(shape_of, 7.0, dtype=x.dtype, device=CUDA)
                ops.moe_linear(x, w, plan, power_of_two=power_of_two, out=out, **options)
                found.append(out)
            assert_same_bits(found[1], found[0])


@pytest.mark.parametrize("to", ["experts", "slots"])
@pytest.mark.parametrize("form", FORMS)
def test_same_bits_on_both_sides_of_the_rule(form: str, to: str) -> None:
    """Of 33 tokens a launch quantises rows, of the first 32 the product does."""
    experts, top_k, n, k = 128, 8, 272, 768
    logits = torch.randn(33, experts, device=CUDA)
    _, w, scales = operands(form, 33, experts, n, k, CUDA)
    packed, dtype = ops.pack_experts(w), torch.bfloat16
    by_slot = rows_of(33 * top_k, k, dtype)
    found = []
    for tokens, active in ((33, 33), (32, 32), (33, 32), (1, 1)):
        plan = ops.moe_route(logits[:tokens], top_k, n_active=int32([active], CUDA))
        assert quantizes_rows(by_slot, dtype, tokens * top_k, experts, 8) == (tokens <= 32)
        slots = plan.rows[: active * top_k].long()
        if to == "experts":
            x, n_active = by_slot[:tokens], int32([active], CUDA)
        else:  # each slot has the same row in every batch
            x = torch.full((tokens * top_k, k), math.nan, dtype=dtype, device=CUDA)
            x[: active * top_k] = by_slot[slots]
            n_active = plan.n_rows
        y = ops.moe_linear(x, packed, plan, to=to, w_scale=scales["w_scale"], n_active=n_active)
        if to == "experts":
            rows = y[: active * top_k].clone()
            y = torch.empty_like(rows)
            y[slots] = rows
        found.append(y.view(-1, top_k, n)[:active])
    for other in found[1:]:
        assert_same_bits(other, found[0][: len(other)])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("tokens", [1, 9, 32])
def test_behind_the_first_product_in_a_graph(in_product: Any, form: str, tokens: int) -> None:
    """Launched before its input is written: replays over many routings, padding and NaN."""
    experts, top_k, width, inner = 32, 4, 512, 384
    _, gate_up, first = operands(form, tokens, experts, 2 * inner, width, CUDA)
    x = rows_of(tokens, width, torch.bfloat16)
    _, down, second = operands(form, tokens * top_k, experts, width, inner, CUDA)
    packed = (ops.pack_experts(gate_up, gated=True), ops.pack_experts(down))
    logits, active = torch.randn(tokens, experts, device=CUDA), int32([tokens], CUDA)

    def step() -> torch.Tensor:
        plan = ops.moe_route(logits, top_k, renormalize=True, n_active=active)
        scales = (first["w_scale"], second["w_scale"])
        h = ops.moe_linear(
            *(x, packed[0], plan),
            to="experts",
            w_scale=scales[0],
            activation="silu_mul",
            n_active=active,
        )
        y = ops.moe_linear(
            *(h, packed[1], plan), to="slots", w_scale=scales[1], n_active=plan.n_rows, early=True
        )
        return ops.moe_combine(y, plan).total

    in_product(True)
    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    changed = torch.zeros((), dtype=torch.int64, device=CUDA)
    for replay in range(300):
        logits.normal_()
        if replay % 4 == 1:
            logits[:, replay % experts] += 4
        elif replay % 4 == 2:
            logits[:, :top_k] += 50
        if replay % 7 == 3:
            logits[replay % tokens, replay % experts] = math.nan
        active.fill_(tokens if replay % 3 else replay % (tokens + 1))
        x.copy_(rows_of(tokens, width, x.dtype))
        graph.replay()
        in_product(False)
        with pdl(False):
            expected = step()
        changed += (found.view(torch.int16) != expected.view(torch.int16)).sum()
    assert int(changed) == 0
    first_bits = found.clone()
    for _ in range(10_000 if tokens == 9 else 500):
        graph.replay()
    assert_same_bits(found, first_bits)
