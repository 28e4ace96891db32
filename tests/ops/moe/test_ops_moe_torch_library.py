"""The ops of a mixture of experts as torch sees them: schemas, fakes, tracing and autocast."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from moe_cases import operands
from ops_cases import assert_same_bits

from effort import effort
from ostinato import ops

FORMS = effort(("block",), ("int8", "block", "bf16"))


def block(
    x: torch.Tensor,
    logits: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    *scales: torch.Tensor,
) -> tuple[torch.Tensor | None, ...]:
    """Return a whole block: total, norm and scale."""
    names = ("x_scale", "w_scale")
    plan = ops.moe_route(logits, 2, renormalize=True)
    first = dict(zip(names, scales[:2], strict=False))
    h = ops.moe_linear(x, gate_up, plan, to="experts", activation="silu_mul", **first)
    second: dict[str, Any] = {}
    if len(scales):
        second = {"w_scale": scales[2], "n_active": plan.n_rows, "early": True}
        second["power_of_two"] = scales[0].dim() == 2
    y = ops.moe_linear(h, down, plan, to="slots", out_dtype=residual.dtype, **second)
    return ops.moe_combine(
        y, plan, residual=residual, norm_weight=weight, quantize=torch.int8, shared=residual
    )


def arguments(form: str, device: torch.device) -> list[torch.Tensor]:
    tokens, experts, width, inner = 6, 8, 128, 64
    x, gate_up, first = operands(form, tokens, experts, 2 * inner, width, device)
    _, down, second = operands(form, tokens * 2, experts, width, inner, device)
    others = [torch.randn(tokens, experts), gate_up, down]
    residual = torch.randn(tokens, width).bfloat16()
    others += [residual, torch.randn(width)]
    scales = [*first.values(), *([second["w_scale"]] if second else [])]
    return [x, *(t.to(device) for t in (*others, *scales))]


@pytest.mark.parametrize("form", FORMS)
def test_a_block_traces_into_one_graph(form: str, device: torch.device) -> None:
    given = arguments(form, device)
    traced = torch.compile(block, fullgraph=True, backend="aot_eager")
    for got, expected in zip(traced(*given), block(*given), strict=True):
        assert got is not None
        assert expected is not None
        assert_same_bits(got, expected)


@pytest.mark.parametrize("form", FORMS)
def test_autocast_changes_no_bit(form: str, device: torch.device) -> None:
    given = arguments(form, device)
    expected = block(*given)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        found = block(*given)
    for got, want in zip(found, expected, strict=True):
        assert got is not None
        assert want is not None
        assert_same_bits(got, want)


def test_opcheck(device: torch.device) -> None:
    """Schemas and fakes, on the tensors that the public ops pass."""
    x, logits, gate_up, down, residual, weight = arguments("bf16", device)
    plan = ops.moe_route(logits, 2)
    router = (logits, "softmax", True, 1.0, None, 1, 1, "max", None, *plan)
    tables = (plan.ids, plan.rows, plan.offsets, plan.tiles, plan.n_tiles, plan.tile_tokens)
    rows = torch.zeros(12, 64, dtype=x.dtype, device=device)
    first = (x, gate_up, None, None, 128, True, True, False, False, None, *tables, rows)
    slots = torch.zeros(6, 2, 128, dtype=x.dtype, device=device)
    second = (rows, down, None, None, 128, False, False, True, False, None, *tables, slots)
    codes, scale = down.to(torch.int8), torch.ones(8, 128, device=device)
    how = (128, False, False, True, False, plan.n_rows)
    quantising = (rows, codes, None, scale, *how, *tables, slots)
    total, normed = torch.zeros_like(residual), torch.zeros_like(residual)
    rest = (residual, None, residual, weight, 1e-6, False)
    sums = (slots, plan.ids, plan.weights, *rest, total, normed, None)
    utils = ("test_schema", "test_autograd_registration", "test_faketensor")
    for name, given in (
        ("moe_route", router),
        ("moe_linear", first),
        ("moe_linear", second),
        ("moe_linear", quantising),
        ("moe_combine", sums),
    ):
        op = getattr(torch.ops.ostinato, name).default
        torch.library.opcheck(op, given, test_utils=(*utils, "test_aot_dispatch_dynamic"))


def test_results_carry_no_gradient(device: torch.device) -> None:
    x, logits, gate_up, *_ = arguments("bf16", device)
    plan = ops.moe_route(logits.requires_grad_(), 2)
    assert not plan.weights.requires_grad
    y = ops.moe_linear(x.requires_grad_(), gate_up, plan, to="experts")
    assert not y.requires_grad
