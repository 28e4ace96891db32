"""Quantisation of activations by groups of 128."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from ops_cases import E4M3, FLOATS, assert_same_bits, int32

from ostinato import ops
from ostinato.ops import reference
from ostinato.ops.linear.quantize_groups import power_of_two_scale

pytestmark = pytest.mark.usefixtures("block_kernels")

SHAPES = [(0, 3), (1, 1), (3, 127), (2, 128), (5, 129), (4, 300), (9, 1024), (1, 2056)]


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("x_dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_per_group(
    x_dtype: torch.dtype, shape: tuple[int, int], power_of_two: bool, device: torch.device
) -> None:
    x = (torch.randn(shape) * torch.linspace(0.1, 9, shape[1])).to(x_dtype).to(device)
    values, scale = ops.quantize_per_group(x, power_of_two=power_of_two)
    expected, expected_scale = reference.quantize_per_group(x, power_of_two=power_of_two)
    assert_same_bits(values, expected)
    assert_same_bits(scale, expected_scale)
    assert scale.shape == (-(-shape[1] // 128), shape[0])
    assert shape[0] == 0 or scale.stride(0) % 4 == 0
    for group, of_group in zip(values.float().split(128, 1), scale, strict=True):
        if power_of_two:
            assert (torch.frexp(of_group).mantissa == 0.5).all()
        elif shape[0]:
            assert (group.abs().amax(1) == 448).all()


@given(st.floats(2.0**-126, 2.0**120, width=32))
def test_scales_are_rounded_up_to_powers_of_two(scale: float) -> None:
    rounded = float(power_of_two_scale(torch.tensor(scale)))
    assert math.frexp(rounded)[0] == 0.5
    assert rounded / 2 < scale <= rounded


def test_zeros_infinity_and_nan_stay_in_their_groups(device: torch.device) -> None:
    x = torch.ones(2, 640, device=device)
    x[:, 128:256] = 0.0
    x[:, 300] = math.inf
    x[:, 400] = math.nan
    for power_of_two in (False, True):
        values, scale = ops.quantize_per_group(x, power_of_two=power_of_two)
        ones = 1 / 448 if not power_of_two else 2.0**-8
        assert scale[:, 0].tolist() == pytest.approx([ones, 0, math.inf, math.nan, ones], nan_ok=1)
        assert scale[1, 0] > 0
        assert (values.float()[:, :128] == (448 if not power_of_two else 256)).all()
        assert (values.float()[:, 128:256] == 0).all()
        assert values.float()[:, 384:512].isnan().all()
        assert (values.float()[:, 512:] == (448 if not power_of_two else 256)).all()


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("x_dtype", FLOATS, ids=str)
def test_after_the_norm(
    x_dtype: torch.dtype, with_residual: bool, power_of_two: bool, device: torch.device
) -> None:
    x, residual = (torch.randn(5, 328).to(x_dtype).to(device) for _ in range(2))
    weight = torch.rand(328, device=device).to(x_dtype)
    added = residual if with_residual else None
    options = {"residual": added, "power_of_two": power_of_two}
    values, scale, *total = ops.rms_norm_quantize_per_group(x, weight, 1e-5, **options)
    normed = ops.rms_norm(x.float() if added is None else (x + added).float(), weight.float(), 1e-5)
    assert isinstance(normed, torch.Tensor)
    expected, expected_scale = ops.quantize_per_group(normed, power_of_two=power_of_two)
    if device.type == "cpu" or x_dtype is torch.float32:
        assert_same_bits(values, expected)
        assert_same_bits(scale, expected_scale)
    else:  # the sum of squares has another order than that of fp32 rows
        torch.testing.assert_close(scale, expected_scale, rtol=1e-6, atol=0.0)
        torch.testing.assert_close(values.float(), expected.float(), rtol=0.13, atol=2.0**-9)
    if with_residual:
        assert_same_bits(total[0], x + residual)


@pytest.mark.parametrize("discard_x", [False, True])
@pytest.mark.parametrize("x_dtype", FLOATS, ids=str)
@pytest.mark.parametrize("columns", [128, 328, 1536])
def test_after_the_gate(
    x_dtype: torch.dtype, columns: int, discard_x: bool, device: torch.device
) -> None:
    x = torch.randn(5, 2 * columns).to(x_dtype).to(device)
    expected, expected_scale = ops.quantize_per_group(ops.silu_mul(x.float()))
    values, scale = ops.silu_mul_quantize_per_group(x.clone(), discard_x=discard_x)
    assert_same_bits(values, expected)
    assert_same_bits(scale, expected_scale)


def test_discarded_rows_are_nan_on_the_cpu() -> None:
    x = torch.randn(2, 8)
    ops.silu_mul_quantize_per_group(x, discard_x=True)
    assert x.isnan().all()


@pytest.mark.parametrize("columns", [8, 300, 4096])
def test_rows_do_not_depend_on_each_other(columns: int, device: torch.device) -> None:
    x, weight = torch.randn(40, 2 * columns, device=device), torch.rand(columns, device=device)
    calls: list[Callable[[torch.Tensor], tuple[torch.Tensor, ...]]] = [
        lambda x: ops.quantize_per_group(x[:, :columns]),
        lambda x: ops.rms_norm_quantize_per_group(x[:, :columns], weight, 1e-6),
        ops.silu_mul_quantize_per_group,
    ]
    for call in calls:
        values, scale = call(x)
        for rows in (slice(0, 1), slice(3, 11), slice(39, 40)):
            part, of_part = call(x[rows])
            assert_same_bits(part, values[rows])
            assert_same_bits(of_part, scale[:, rows])


def quantizations(n_active: torch.Tensor | None, device: torch.device) -> list[Any]:
    """Return what every op makes of five rows, of which so many are real."""
    x, options = torch.randn(5, 512, device=device), {"n_active": n_active}
    weight = torch.rand(512, device=device)
    return [
        ops.quantize_per_group(x, **options),
        ops.rms_norm_quantize_per_group(x, weight, 1e-6, **options),
        ops.silu_mul_quantize_per_group(x, **options),
    ]


def test_rows_before_the_padding_are_quantized_as_ever(device: torch.device) -> None:
    torch.manual_seed(3)
    expected = quantizations(None, device)
    for real in (5, 2, 1):
        torch.manual_seed(3)
        found = quantizations(int32([real], device), device)
        for (values, scale), (want, want_scale) in zip(found, expected, strict=True):
            assert_same_bits(values[:real], want[:real])
            assert_same_bits(scale[:, :real], want_scale[:, :real])


X = torch.zeros(2, 4)


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"x": None}, TypeError, "x: got NoneType"),
        ({"x": X.double()}, TypeError, "x: got dtype torch.float64"),
        ({"x": X[0]}, ValueError, r"x: got shape \[4\]"),
        ({"x": X[:, :0]}, ValueError, "x: got "),
        ({"power_of_two": 1}, TypeError, "power_of_two: got int, expected a bool"),
        ({"n_active": 3}, TypeError, "n_active: got int"),
        ({"n_active": torch.ones(2).int()}, ValueError, "n_active: got shape"),
        ({"stream": 1}, ValueError, "stream: got 1"),
    ],
)
def test_bad_input(changes: dict[str, Any], error: type[Exception], match: str) -> None:
    arguments = {"x": X, **changes}
    calls: list[Callable[..., Any]] = [
        ops.quantize_per_group,
        lambda **given: ops.rms_norm_quantize_per_group(**given, weight=torch.ones(4), eps=1e-6),
        ops.silu_mul_quantize_per_group,
    ]
    for call in calls:
        with pytest.raises(error, match=match):
            call(**arguments)


def test_bad_input_of_the_gate() -> None:
    with pytest.raises(ValueError, match="x: got 3 columns, expected an even number"):
        ops.silu_mul_quantize_per_group(X[:, :3])
    with pytest.raises(TypeError, match="discard_x: got int"):
        ops.silu_mul_quantize_per_group(X, discard_x=1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="x: got strides"):
        ops.silu_mul_quantize_per_group(X[:1].expand(2, 4), discard_x=True)


def test_values_are_e4m3(device: torch.device) -> None:
    assert ops.quantize_per_group(torch.ones(2, 4, device=device))[0].dtype is E4M3
