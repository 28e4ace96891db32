"""Asymmetric quantisation of activations, with a scale and a zero point for each row."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import quantize
from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp
from hypothesis import given
from ops_cases import FLOATS, assert_same_bits, int32

from ostinato import ops
from ostinato.ops import reference

pytestmark = pytest.mark.usefixtures("kernels")

# Each alone, fused with the quantisation, and whether it has a bias.
NORMS: dict[str, tuple[Callable[..., Any], Callable[..., tuple[torch.Tensor, ...]], bool]] = {
    "rms_norm": (ops.rms_norm, ops.rms_norm_quantize_asymmetric, False),
    "layer_norm": (ops.layer_norm, ops.layer_norm_quantize_asymmetric, True),
}
SHAPES = [(0, 3), (1, 1), (5, 33), (2, 300), (3, 4096), (2, 9000), (1, 40000)]


def assert_alike(got: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> None:
    for a, b in zip(got, expected, strict=True):
        assert_same_bits(a, b)


@pytest.mark.parametrize("x_dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("shift", [-9.0, 0.0, 0.7, 9.0])
def test_per_token(
    shift: float, shape: tuple[int, int], x_dtype: torch.dtype, device: torch.device
) -> None:
    x = (torch.randn(shape) + shift).to(x_dtype).to(device)
    values, scale, zero_point = ops.quantize_asymmetric(x)
    assert_alike((values, scale, zero_point), reference.quantize_asymmetric(x))
    assert scale.shape == zero_point.shape == shape[:1]
    if x.numel():
        back = (values.float() - zero_point.unsqueeze(1)) * scale.unsqueeze(1)
        assert ((back - x.float()).abs() <= 0.501 * scale.unsqueeze(1) + 1e-5).all()
        if shift == 9.0 and shape[1] > 1:  # half the numbers are not wasted
            assert (zero_point == -128).all()
            assert (values.amax(1) == 127).all()


@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=40))
def test_scales_and_zero_points_are_compressed_tensors(values: list[float]) -> None:
    x = torch.tensor([values])
    arguments = QuantizationArgs(
        num_bits=8, type="int", symmetric=False, strategy="token", dynamic=True
    )
    _, scale, zero_point = ops.quantize_asymmetric(x)
    theirs = compute_dynamic_scales_and_zp(x.unsqueeze(0), arguments, torch.nn.Module())
    if x.abs().max() > 1e-30:  # below, theirs divides by 0
        assert scale.item() == theirs[0].item()
        assert zero_point.item() == theirs[1].item()


def test_codes_are_those_of_compressed_tensors() -> None:
    torch.manual_seed(1)
    x = torch.randn(64, 333) + torch.linspace(-4, 4, 64).unsqueeze(1)
    arguments = QuantizationArgs(
        num_bits=8, type="int", symmetric=False, strategy="token", dynamic=True
    )
    values, scale, zero_point = ops.quantize_asymmetric(x)
    theirs = quantize(x, scale.unsqueeze(1), zero_point.unsqueeze(1), arguments, dtype=torch.int8)
    assert torch.equal(values, theirs)


def test_rows_without_a_range(device: torch.device) -> None:
    x = torch.zeros(3, 8, device=device)
    x[1] = 2.0
    x[2] = -2.0
    values, scale, zero_point = ops.quantize_asymmetric(x)
    back = (values.float() - zero_point.unsqueeze(1)) * scale.unsqueeze(1)
    torch.testing.assert_close(back, x, rtol=1e-6, atol=0.0)
    assert zero_point.tolist() == [-128, -128, 127]
    assert (scale > 0).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("columns", [8, 300, 20000])
def test_rows_beyond_numbers_show_it(bad: float, columns: int, device: torch.device) -> None:
    x = torch.ones(2, columns, device=device)
    x[0, columns // 2] = bad
    values, scale, zero_point = ops.quantize_asymmetric(x)
    weight = torch.ones(16, columns, dtype=torch.int8, device=device)
    y = ops.w8a8_linear(
        values, weight, scale, torch.ones((), device=device), x_zero_point=zero_point
    )
    assert not scale[0].isfinite()
    assert -128 <= int(zero_point[0]) <= 127
    assert not y[0].isfinite().any()
    assert (y[1] == columns).all() or columns > 256
    assert y[1].isfinite().all()


@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("x_dtype", FLOATS, ids=str)
@pytest.mark.parametrize("norm", NORMS)
def test_after_a_norm(
    norm: str, x_dtype: torch.dtype, with_residual: bool, device: torch.device
) -> None:
    x, residual = (torch.randn(5, 328).to(x_dtype).to(device) for _ in range(2))
    weight, bias = (torch.rand(328, device=device).to(x_dtype) for _ in range(2))
    added = residual if with_residual else None
    norm_alone, quantize_norm, biases = NORMS[norm]
    given = {"bias": bias} if biases else {}
    got = quantize_norm(x, weight, 1e-5, residual=added, **given)
    (values, scale, zero_point), total = got[:3], got[3:]
    total_fp32 = x.float() if added is None else (x + added).float()
    in_fp32 = {name: tensor.float() for name, tensor in given.items()}
    normed = norm_alone(total_fp32, weight.float(), 1e-5, **in_fp32)
    assert isinstance(normed, torch.Tensor)
    expected = ops.quantize_asymmetric(normed)
    if device.type == "cpu" or x_dtype is torch.float32:
        assert_alike((values, scale, zero_point), expected)
    else:  # the sum of squares has another order than that of fp32 rows
        torch.testing.assert_close(scale, expected[1], rtol=1e-6, atol=0.0)
        torch.testing.assert_close(zero_point, expected[2], rtol=0, atol=1)
        torch.testing.assert_close(values, expected[0], rtol=0, atol=1)
    if with_residual:
        assert_same_bits(total[0], x + residual)


@pytest.mark.parametrize("discard_x", [False, True])
@pytest.mark.parametrize("x_dtype", FLOATS, ids=str)
@pytest.mark.parametrize("columns", [128, 328, 14336])
@pytest.mark.parametrize("kind", ["silu_mul", "gelu_tanh_mul", "gelu", "relu2"])
def test_after_an_activation(
    kind: str, x_dtype: torch.dtype, columns: int, discard_x: bool, device: torch.device
) -> None:
    x = torch.randn(3, 2 * columns if kind.endswith("_mul") else columns).to(x_dtype).to(device)
    expected = ops.quantize_asymmetric(ops.activation(x.float(), kind))
    got = ops.activation_quantize_asymmetric(x.clone(), kind, discard_x=discard_x)
    assert_alike(got, expected)


def test_references_do_as_the_ops(device: torch.device) -> None:
    x, weight = torch.randn(4, 64, device=device), torch.rand(64, device=device)
    for got, wanted in (
        (
            ops.rms_norm_quantize_asymmetric(x, weight, 1e-5),
            reference.rms_norm_quantize_asymmetric(x, weight, 1e-5),
        ),
        (
            ops.layer_norm_quantize_asymmetric(x, weight, 1e-5, bias=weight),
            reference.layer_norm_quantize_asymmetric(x, weight, 1e-5, bias=weight),
        ),
        (
            ops.activation_quantize_asymmetric(x, "gelu_mul"),
            reference.activation_quantize_asymmetric(x, "gelu_mul"),
        ),
    ):
        torch.testing.assert_close(got[1], wanted[1], rtol=1e-5, atol=0.0)
        for codes, theirs in ((got[0], wanted[0]), (got[2], wanted[2])):
            torch.testing.assert_close(codes, theirs, rtol=0, atol=1)


def test_discarded_rows_are_nan_on_the_cpu() -> None:
    x = torch.randn(2, 8)
    ops.activation_quantize_asymmetric(x, "silu_mul", discard_x=True)
    assert x.isnan().all()


@pytest.mark.parametrize("columns", [8, 300, 4096, 14336])
def test_rows_do_not_depend_on_each_other(columns: int, device: torch.device) -> None:
    x, weight = torch.randn(40, 2 * columns, device=device), torch.rand(columns, device=device)
    calls: list[Callable[[torch.Tensor], tuple[torch.Tensor, ...]]] = [
        lambda x: ops.quantize_asymmetric(x[:, :columns]),
        lambda x: ops.rms_norm_quantize_asymmetric(x[:, :columns], weight, 1e-6),
        lambda x: ops.layer_norm_quantize_asymmetric(x[:, :columns], weight, 1e-6, bias=weight),
        lambda x: ops.activation_quantize_asymmetric(x, "silu_mul"),
        lambda x: ops.activation_quantize_asymmetric(x, "relu2"),
    ]
    for call in calls:
        whole = call(x)
        for rows in (slice(0, 1), slice(3, 11), slice(39, 40)):
            assert_alike(call(x[rows]), tuple(result[rows] for result in whole))


def test_rows_before_the_padding_are_quantized_as_ever(device: torch.device) -> None:
    x, weight = torch.randn(5, 512, device=device), torch.rand(512, device=device)
    calls: list[Callable[..., tuple[torch.Tensor, ...]]] = [
        lambda **how: ops.quantize_asymmetric(x, **how),
        lambda **how: ops.rms_norm_quantize_asymmetric(x, weight, 1e-6, residual=x, **how),
        lambda **how: ops.layer_norm_quantize_asymmetric(x, weight, 1e-6, residual=x, **how),
        lambda **how: ops.activation_quantize_asymmetric(x, "silu_mul", **how),
    ]
    for call in calls:
        expected = call()
        for real in (5, 2, 1):
            found = call(n_active=int32([real], device))
            assert_alike(tuple(t[:real] for t in found), tuple(t[:real] for t in expected))


X = torch.zeros(2, 4)


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"x": None}, TypeError, "x: got NoneType"),
        ({"x": X.double()}, TypeError, "x: got dtype torch.float64"),
        ({"x": X[0]}, ValueError, r"x: got shape \[4\]"),
        ({"x": X[:, :0]}, ValueError, "x: got "),
        ({"n_active": 3}, TypeError, "n_active: got int"),
        ({"n_active": torch.ones(2).int()}, ValueError, "n_active: got shape"),
        ({"stream": 1}, ValueError, "stream: got 1"),
    ],
)
def test_bad_input(changes: dict[str, Any], error: type[Exception], match: str) -> None:
    arguments = {"x": X, **changes}
    calls: list[Callable[..., Any]] = [
        ops.quantize_asymmetric,
        lambda **given: ops.rms_norm_quantize_asymmetric(**given, weight=torch.ones(4), eps=1e-6),
        lambda **given: ops.layer_norm_quantize_asymmetric(**given, weight=torch.ones(4), eps=1e-6),
        lambda **given: ops.activation_quantize_asymmetric(**given, kind="silu_mul"),
    ]
    for call in calls:
        with pytest.raises(error, match=match):
            call(**arguments)


def test_bad_input_of_norms_and_activations() -> None:
    with pytest.raises(ValueError, match="weight: got shape"):
        ops.rms_norm_quantize_asymmetric(X, torch.ones(3), 1e-6)
    with pytest.raises(ValueError, match="bias: got shape"):
        ops.layer_norm_quantize_asymmetric(X, torch.ones(4), 1e-6, bias=torch.ones(3))
    with pytest.raises(ValueError, match="x: got 3 columns, expected an even number"):
        ops.activation_quantize_asymmetric(X[:, :3], "silu_mul")
    with pytest.raises(ValueError, match="kind: got 'tanh'"):
        ops.activation_quantize_asymmetric(X, "tanh")
    with pytest.raises(TypeError, match="discard_x: got int"):
        ops.activation_quantize_asymmetric(X, "silu_mul", discard_x=1)  # type: ignore[arg-type]
