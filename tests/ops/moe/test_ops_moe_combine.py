"""The sum over the experts of a token."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from moe_cases import routing
from ops_cases import E4M3, FLOATS, assert_same_bits, int32

from ostinato import ops
from ostinato.ops import reference


def inputs(
    tokens: int, top_k: int, width: int, dtype: torch.dtype, device: torch.device
) -> dict[str, torch.Tensor]:
    shapes = {
        "y": (tokens, top_k, width),
        "shared": (tokens, width),
        "shared_gate": (tokens, 1),
        "residual": (tokens, width),
        "norm_weight": (width,),
    }
    return {name: torch.randn(shape).to(device, dtype) for name, shape in shapes.items()}


def twin(plan: ops.MoePlan, arguments: dict[str, Any], dtype: torch.dtype) -> Any:
    here = ops.MoePlan(*(p.cpu() if isinstance(p, torch.Tensor) else p for p in plan))
    given = {k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}
    return reference.moe_combine(given.pop("y"), here, dtype=dtype, **given)


PARTS = [
    (),
    ("shared",),
    ("residual",),
    ("shared", "shared_gate", "residual"),
    ("shared", "shared_gate", "residual", "norm_weight"),
    ("norm_weight",),
]


@pytest.mark.parametrize("parts", PARTS, ids="+".join)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(("tokens", "width"), [(0, 16), (1, 8), (5, 130), (3, 2048)])
def test_sum_and_norm_as_the_twin(
    parts: tuple[str, ...], dtype: torch.dtype, tokens: int, width: int, device: torch.device
) -> None:
    plan = routing(tokens, 8, 3, device)
    given = inputs(tokens, 3, width, dtype, device)
    arguments = {name: given[name] for name in ("y", *parts)}
    got = ops.moe_combine(plan=plan, **arguments)
    total, normed, _ = twin(plan, arguments, torch.float64)
    eps = torch.finfo(dtype).eps
    # An element of the sum of terms of about 1 is rounded once; its terms are, in fp32.
    assert_within(got.total, total, eps / 2, 2e-6)
    assert (got.normed is None) == (normed is None)
    assert got.scale is None
    if normed is not None and got.normed is not None:
        # A norm of the rounded sum: where that differs by a unit, so may the norm.
        assert_within(got.normed, normed, 2 * eps, 4 * eps)


def assert_within(got: torch.Tensor, exact: torch.Tensor, relative: float, absolute: float) -> None:
    error = (got.double().cpu() - exact).abs()
    assert (error <= relative * 1.01 * exact.abs() + absolute).all()


@pytest.mark.parametrize("form", ["int8", "e4m3", "group", "group_power_of_two"])
@pytest.mark.parametrize("width", [64, 300])
def test_codes_are_those_of_the_norm_of_the_total(
    form: str, width: int, device: torch.device
) -> None:
    """Bit for bit those of the ops that do it in two launches."""
    plan, given = routing(6, 8, 2, device), inputs(6, 2, width, torch.bfloat16, device)
    given["norm_weight"] = given["norm_weight"].float()
    dtype = torch.int8 if form == "int8" else E4M3
    options: dict[str, Any] = {"per_group": form.startswith("group")}
    options["power_of_two"] = form == "group_power_of_two"
    got = ops.moe_combine(plan=plan, quantize=dtype, eps=1e-5, **given, **options)
    weight = given.pop("norm_weight")
    total = ops.moe_combine(plan=plan, **given).total
    assert_same_bits(got.total, total)
    if options.pop("per_group"):
        codes, scale = ops.rms_norm_quantize_per_group(total, weight, 1e-5, **options)
    else:
        codes, scale = ops.rms_norm_quantize(total, weight, 1e-5, dtype)
    assert got.normed is not None
    assert got.scale is not None
    assert_same_bits(got.normed, codes)
    assert_same_bits(got.scale, scale)


def test_slots_without_an_expert(device: torch.device) -> None:
    """Padding adds nothing, whatever its slots hold; NaN logits make their own token NaN."""
    logits = torch.randn(4, 8).to(device)
    logits[1, 0] = math.nan
    plan = ops.moe_route(logits, 2, n_active=int32([3], device))
    y = torch.randn(4, 2, 16).to(device)
    y[1] = 1.0
    y[3] = math.nan
    residual = torch.randn(4, 16).to(device)
    got = ops.moe_combine(y, plan, residual=residual)
    assert got.total[1].isnan().all()
    assert_same_bits(got.total[3], residual[3])
    assert got.total[[0, 2]].isfinite().all()


def test_a_token_has_the_same_bits_in_every_batch(device: torch.device) -> None:
    logits = torch.randn(33, 16).to(device)
    given = inputs(33, 4, 200, torch.bfloat16, device)

    def block(start: int, stop: int) -> ops.Combined:
        plan = ops.moe_route(logits[start:stop], 4)
        rows = {k: v if k == "norm_weight" else v[start:stop] for k, v in given.items()}
        return ops.moe_combine(plan=plan, quantize=torch.int8, **rows)

    whole = block(0, 33)
    for start, stop in ((0, 1), (5, 9), (2, 33)):
        for got, expected in zip(block(start, stop), whole, strict=True):
            assert got is not None
            assert expected is not None
            assert_same_bits(got, expected[start:stop])


def test_out_is_the_total(device: torch.device) -> None:
    plan, given = routing(3, 8, 2, device), inputs(3, 2, 16, torch.float32, device)
    out = torch.full((3, 24), 5.0, device=device)
    got = ops.moe_combine(given["y"], plan, out=out[:, :16])
    assert got.total.data_ptr() == out.data_ptr()
    assert (out[:, 16:] == 5).all()
    assert_same_bits(got.total, ops.moe_combine(given["y"], plan).total)


def block_of(
    x: torch.Tensor, gate_up: ops.PackedExperts, down: ops.PackedExperts, plan: ops.MoePlan
) -> torch.Tensor:
    h = ops.moe_linear(x, gate_up, plan, to="experts", activation="silu_mul")
    return ops.moe_combine(ops.moe_linear(h, down, plan, to="slots"), plan).total


def test_a_block_as_a_dense_layer_per_token() -> None:
    """Route, both products and sum: each token by itself with the weights of its experts."""
    x = torch.randn(9, 32).bfloat16()
    gate_up, down = torch.randn(6, 48, 32) / 6, torch.randn(6, 32, 24) / 5
    logits = torch.randn(9, 6)
    plan = ops.moe_route(logits, 2, renormalize=True)
    packed = (ops.pack_experts(gate_up.bfloat16(), gated=True), ops.pack_experts(down.bfloat16()))
    got = block_of(x, *packed, plan).double()
    for token in range(9):
        values, chosen = logits[token].double().softmax(0).topk(2)
        expected = torch.zeros(32, dtype=torch.float64)
        for weight, expert in zip(values / values.sum(), chosen, strict=True):
            gate, up = (gate_up[expert].bfloat16().double() @ x[token].double()).chunk(2)
            h = torch.nn.functional.silu(gate) * up
            expected += weight * (down[expert].bfloat16().double() @ h)
        torch.testing.assert_close(got[token], expected, rtol=2e-2, atol=2e-2)


PLAN = routing(2, 4, 2, torch.device("cpu"))
Y = torch.zeros(2, 2, 8)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"y": Y[:, :1]}, ValueError, r"y: got shape \[2, 1, 8\], expected \[2, 2, H\]"),
        ({"y": Y.double()}, TypeError, "y: got dtype torch.float64"),
        ({"y": Y[:, :, :0]}, ValueError, "y: got H = 0"),
        ({"plan": (1,)}, TypeError, "plan: got tuple"),
        ({"shared": Y[0]}, None, ""),
        ({"shared": Y[0, :1]}, ValueError, r"shared: got shape \[1, 8\]"),
        ({"shared_gate": Y[:, 0, 0]}, ValueError, "shared_gate: got a tensor, expected None"),
        (
            {"shared": Y[0], "shared_gate": Y[0, :, :2]},
            ValueError,
            r"shared_gate: got shape \[2, 2\], expected \[2, 1\]",
        ),
        ({"residual": Y[0].bfloat16()}, TypeError, "residual: got dtype torch.bfloat16"),
        ({"norm_weight": torch.ones(7)}, ValueError, r"norm_weight: got shape \[7\]"),
        ({"eps": -1.0}, ValueError, "eps: got -1.0"),
        ({"quantize": torch.int8}, ValueError, "quantize: got torch.int8, expected None without"),
        (
            {"quantize": torch.int4, "norm_weight": torch.ones(8)},
            TypeError,
            "quantize: got torch.int4",
        ),
        (
            {"quantize": torch.int8, "norm_weight": torch.ones(8), "per_group": True},
            ValueError,
            "per_group: got True with quantize = torch.int8",
        ),
        ({"power_of_two": True}, ValueError, "power_of_two: got True"),
        ({"out": Y[0, :1]}, ValueError, r"out: got shape \[1, 8\]"),
    ],
)
def test_bad_arguments_are_named(
    change: dict[str, Any], error: type[Exception] | None, message: str
) -> None:
    arguments: dict[str, Any] = {"y": Y, "plan": PLAN} | change
    if error is None:
        ops.moe_combine(**arguments)
        return
    with pytest.raises(error, match=message):
        ops.moe_combine(**arguments)
