"""Quantisation of activations."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from ops_cases import E4M3, FLOATS, assert_same_bits

from ostinato import ops
from ostinato.ops import reference
from ostinato.ops.common.e4m3 import to_float32

pytestmark = pytest.mark.usefixtures("kernels")

GRID_MAX = {torch.int8: 127.0, E4M3: 448.0}


@pytest.mark.parametrize("dtype", [torch.int8, E4M3], ids=str)
@pytest.mark.parametrize("x_dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", [(0, 3), (1, 1), (5, 33), (2, 300)], ids=str)
def test_per_token(
    dtype: torch.dtype, x_dtype: torch.dtype, shape: tuple[int, int], device: torch.device
) -> None:
    x = torch.randn(shape).to(x_dtype).to(device)
    values, scale = ops.quantize_per_token(x, dtype)
    expected, expected_scale = reference.quantize_per_token(x, dtype)
    assert_same_bits(values, expected)
    assert_same_bits(scale, expected_scale)
    assert_same_bits(scale.cpu(), x.cpu().float().abs().amax(1) / GRID_MAX[dtype])
    if x.numel():
        assert (values.float().abs().amax(1) == GRID_MAX[dtype]).all()


@pytest.mark.parametrize("dtype", [torch.int8, E4M3], ids=str)
def test_rows_of_zeros_get_a_positive_scale(dtype: torch.dtype, device: torch.device) -> None:
    x = torch.zeros(2, 8, device=device)
    x[1, 3] = 1e-45
    values, scale = ops.quantize_per_token(x, dtype)
    assert (values.float() == 0).all()
    assert (scale > 0).all()
    assert scale.isfinite().all()


@settings(max_examples=200)
@given(st.lists(st.floats(-300, 300, width=32), min_size=1, max_size=40))
def test_int8_rounds_half_to_even_like_numpy(values: list[float]) -> None:
    x = torch.tensor([values])
    expected = np.clip(np.rint(np.array(values, dtype=np.float32)), -128, 127)
    got = ops.quantize_per_tensor(x, torch.ones(()), torch.int8)
    np.testing.assert_array_equal(got[0].numpy(), expected)


def test_ties_go_to_even(device: torch.device) -> None:
    x = torch.tensor([[0.5, 1.5, 2.5, -0.5, -1.5, 126.5, -126.5, -127.5]], device=device)
    got = ops.quantize_per_tensor(x, torch.ones(1, device=device), torch.int8)
    assert got.tolist() == [[0, 2, 2, 0, -2, 126, -126, -128]]
    # Between 16 and 32 e4m3 has steps of 2; subnormals have steps of 2^-9.
    x = torch.tensor([[17.0, 19.0, -21.0, 2.0**-10, 3 * 2.0**-10]], device=device)
    got = ops.quantize_per_tensor(x, torch.ones((), device=device), E4M3)
    assert got.float().tolist() == [[16.0, 20.0, -20.0, 0.0, 2.0**-8]]


@pytest.mark.parametrize("zero_point", [None, -128, -3, 0, 100, 127])
def test_static_int8(zero_point: int | None, device: torch.device) -> None:
    x = torch.randn(5, 20, device=device) * 3
    scale = torch.tensor(0.02, device=device)
    zero = None
    if zero_point is not None:
        zero = torch.tensor(zero_point, dtype=torch.int32, device=device)
    values = ops.quantize_per_tensor(x, scale, torch.int8, zero_point=zero)
    assert_same_bits(values, reference.quantize_per_tensor(x, scale, torch.int8, zero_point=zero))
    unclipped = (x / scale).round() + (zero_point or 0)
    assert_same_bits(values.float(), unclipped.clamp(-128, 127))


@pytest.mark.parametrize("x_dtype", FLOATS, ids=str)
def test_static_int8_saturates_to_its_whole_range(
    x_dtype: torch.dtype, device: torch.device
) -> None:
    big = torch.finfo(x_dtype).max
    x = torch.tensor([[-big, -129.0, -128.0, -127.0, 127.0, 128.0, big, -math.inf]])
    x, expected = x.to(device, x_dtype), [[-128, -128, -128, -127, 127, 127, 127, -128]]
    one = torch.ones((), device=device)
    for values in (
        ops.quantize_per_tensor(x, one, torch.int8),
        reference.quantize_per_tensor(x, one, torch.int8),
    ):
        assert values.tolist() == expected


@pytest.mark.parametrize("x_dtype", FLOATS, ids=str)
def test_fused_static_int8_saturates_likewise(x_dtype: torch.dtype, device: torch.device) -> None:
    signs = torch.tensor([[-1.0, 1.0, -1.0, 1.0]], device=device, dtype=x_dtype)
    ones, one = torch.ones_like(signs[0]), torch.tensor(2.0**-8, device=device)
    gated = torch.cat([200 * torch.ones_like(signs), 200 * signs], dim=1)
    for op in (ops, reference):
        normed = op.rms_norm_quantize(signs, ones, 0.0, torch.int8, scale=one)[0]
        assert normed.tolist() == [[-128, 127, -128, 127]]
        values = op.silu_mul_quantize(gated, torch.int8, scale=one)[0]
        assert values.tolist() == [[-128, 127, -128, 127]]


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1))
def test_dynamic_int8_stays_within_127(values: list[float]) -> None:
    codes, _ = ops.quantize_per_token(torch.tensor([values]), torch.int8)
    assert codes.min() >= -127


@pytest.mark.parametrize("x_dtype", FLOATS, ids=str)
def test_e4m3_saturates(x_dtype: torch.dtype, device: torch.device) -> None:
    big = torch.finfo(x_dtype).max
    x = torch.tensor([[big, -big, 449.0, 480.0, 1e4, math.inf]], device=device).to(x_dtype)
    values = ops.quantize_per_tensor(x, torch.ones((), device=device), E4M3)
    assert values.float().tolist() == [[448.0, -448.0, 448.0, 448.0, 448.0, 448.0]]
    values, scale = ops.quantize_per_token(x[:, :2], E4M3)
    assert values.float().tolist() == [[448.0, -448.0]]
    assert scale.isfinite().all()


def test_every_e4m3_number_widens_exactly(device: torch.device) -> None:
    numbers = torch.arange(256, dtype=torch.uint8, device=device).view(E4M3)
    bits = numbers.view(torch.uint8).tolist()
    for got, byte in zip(to_float32(numbers).tolist(), bits, strict=True):
        exponent, mantissa = byte >> 3 & 15, byte & 7
        size = (8 + mantissa) * 2.0 ** (exponent - 10) if exponent else mantissa * 2.0**-9
        if byte & 0x7F == 0x7F:
            assert math.isnan(got)
        else:
            assert got == math.copysign(size, -1 if byte & 0x80 else 1)
    back = ops.quantize_per_tensor(
        to_float32(numbers[:0x7F]).unsqueeze(0), torch.ones((), device=device), E4M3
    )
    assert_same_bits(back[0], numbers[:0x7F])


@pytest.mark.parametrize("dtype", [torch.int8, E4M3], ids=str)
def test_strides_and_outputs(dtype: torch.dtype, device: torch.device) -> None:
    x = torch.randn(4, 20, device=device)[::2, 3:15]
    out = torch.zeros(2, 30, device=device).to(dtype)[:, 7:19]
    scale_out = torch.zeros(2, device=device)
    values, scale = ops.quantize_per_token(x, dtype, out=out, scale_out=scale_out)
    assert values is out
    assert scale is scale_out
    expected, expected_scale = ops.quantize_per_token(x.contiguous(), dtype)
    assert_same_bits(values, expected)
    assert_same_bits(scale, expected_scale)
    assert ops.quantize_per_tensor(x, torch.ones(1, device=device), dtype, out=out) is out


@pytest.mark.parametrize("dtype", [torch.int8, E4M3], ids=str)
def test_the_op_quantizes_also_when_nobody_asks_for_the_scale(
    dtype: torch.dtype, device: torch.device
) -> None:
    x = torch.randn(3, 8, device=device)
    out = torch.zeros(3, 4, device=device).to(dtype)
    torch.ops.ostinato.activation_quantize(x, "silu_mul", None, None, False, out, None)
    assert_same_bits(out, ops.silu_mul_quantize(x, dtype)[0])


def test_nan_is_not_hidden_by_dynamic_scales(device: torch.device) -> None:
    x = torch.ones(2, 4, device=device)
    x[0, 1] = math.nan
    values, scale = ops.quantize_per_token(x, E4M3)
    assert scale[0].isnan()
    assert values[0].float().isnan().all()
    _, scale = ops.quantize_per_token(x, torch.int8)
    assert scale[0].isnan()
    assert_same_bits(scale[1].cpu(), torch.tensor(1.0) / 127)


X = torch.zeros(2, 4)
BAD = [
    ({"x": None}, TypeError, "x: got NoneType"),
    ({"x": torch.zeros(2, 4).double()}, TypeError, "x: got dtype torch.float64"),
    ({"x": torch.zeros(4)}, ValueError, r"x: got shape \[4\]"),
    ({"x": torch.zeros(4, 0)}, ValueError, "x: got K = 0"),
    ({"dtype": torch.uint8}, TypeError, "dtype: got torch.uint8, expected torch.int8 or"),
    ({"dtype": torch.float8_e5m2}, TypeError, "dtype: got torch.float8_e5m2"),
    ({"out": torch.zeros(2, 4)}, TypeError, "out: got dtype torch.float32"),
    ({"out": torch.zeros(1, 4).char()}, ValueError, "out: got shape"),
    ({"out": torch.zeros(1, 4).char().expand(2, 4)}, ValueError, "out: got strides"),
    ({"stream": 1}, ValueError, "stream: got 1"),
]


@pytest.mark.parametrize(("changes", "error", "match"), BAD)
def test_bad_input(changes: dict[str, Any], error: type[Exception], match: str) -> None:
    arguments = {"x": X, "dtype": torch.int8, **changes}
    with pytest.raises(error, match=match):
        ops.quantize_per_token(**arguments)
    with pytest.raises(error, match=match):
        ops.quantize_per_tensor(**arguments, scale=torch.ones(()))


def test_bad_scale_out() -> None:
    with pytest.raises(ValueError, match=r"scale_out: got shape \[3\], expected \[2\]"):
        ops.quantize_per_token(X, torch.int8, scale_out=torch.zeros(3))
    with pytest.raises(ValueError, match="scale_out: got strides"):
        ops.quantize_per_token(X, torch.int8, scale_out=torch.zeros(1).expand(2))


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"scale": torch.ones(2)}, ValueError, r"scale: got shape \[2\], expected \[1\]"),
        ({"scale": torch.ones(()).half()}, TypeError, "scale: got dtype torch.float16"),
        ({"scale": 1.0}, TypeError, "scale: got float"),
        ({"scale": None}, TypeError, "scale: got NoneType, expected a tensor"),
        ({"scale": None, "check_scales": True}, TypeError, "scale: got NoneType, expected a te"),
        (
            {"scale": None, "zero_point": torch.ones(()).int()},
            TypeError,
            "scale: got NoneType, expected a tensor",
        ),
        ({"zero_point": 400}, TypeError, "zero_point: got int"),
        ({"zero_point": torch.ones(())}, TypeError, "zero_point: got dtype torch.float32"),
        ({"zero_point": torch.ones(2).int()}, ValueError, "zero_point: got shape"),
        (
            {"zero_point": torch.ones(()).int(), "dtype": E4M3},
            ValueError,
            "zero_point: got a tensor, expected None for torch.float8_e4m3fn",
        ),
    ],
)
def test_bad_static_input(changes: dict[str, Any], error: type[Exception], match: str) -> None:
    arguments = {"x": X, "dtype": torch.int8, "scale": torch.ones(()), **changes}
    with pytest.raises(error, match=match):
        ops.quantize_per_tensor(**arguments)


@pytest.mark.parametrize("bad", [0.0, -0.5, math.nan, math.inf])
def test_scales_are_checked_where_asked(bad: float, device: torch.device) -> None:
    x, weight = torch.ones(2, 4, device=device), torch.ones(4, device=device)
    calls: list[Callable[..., Any]] = [
        lambda **options: ops.quantize_per_tensor(x, dtype=torch.int8, **options),
        lambda **options: ops.silu_mul_quantize(x, E4M3, **options),
        lambda **options: ops.rms_norm_quantize(x, weight, 1e-6, torch.int8, **options),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=f"scale: got {bad}, expected finite numbers above 0"):
            call(scale=torch.tensor([bad], device=device), check_scales=True)
        call(scale=torch.tensor(0.5, device=device), check_scales=True)
        with pytest.raises(TypeError, match="check_scales: got int, expected a bool"):
            call(scale=torch.tensor(0.5, device=device), check_scales=1)
    ops.silu_mul_quantize(x, E4M3, check_scales=True)


@pytest.mark.parametrize("bad", [-129, 128, 400, -(2**31), 2**31 - 1])
def test_zero_points_beyond_int8_are_refused(bad: int, device: torch.device) -> None:
    x, weight = torch.ones(2, 4, device=device), torch.ones(4, device=device)
    one = torch.ones((), device=device)
    # On a GPU the host sees no number unless it is asked to wait.
    options: dict[str, Any] = {"scale": one, "check_scales": device.type == "cuda"}
    out = torch.full((2, 4), 7, dtype=torch.int8, device=device)
    calls: list[Callable[..., Any]] = [
        lambda zero: ops.quantize_per_tensor(
            x, dtype=torch.int8, zero_point=zero, out=out, **options
        ),
        lambda zero: ops.silu_mul_quantize(x, torch.int8, zero_point=zero, **options),
        lambda zero: ops.rms_norm_quantize(x, weight, 0.0, torch.int8, zero_point=zero, **options),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=f"zero_point: got {bad}, expected -128 to 127"):
            call(torch.tensor([bad], dtype=torch.int32, device=device))
        if call is calls[0]:
            assert (out == 7).all()
        for good in (-128, 127):
            call(torch.tensor(good, dtype=torch.int32, device=device))


def quantizations(n_active: torch.Tensor | None, device: torch.device) -> list[Any]:
    """Return what every op makes of five rows, of which so many are real."""
    x, options = torch.randn(5, 64, device=device), {"n_active": n_active}
    one, weight = torch.ones((), device=device), torch.rand(64, device=device)
    return [
        ops.quantize_per_token(x, torch.int8, **options),
        (ops.quantize_per_tensor(x, one, torch.int8, **options),),
        ops.silu_mul_quantize(x, torch.int8, **options),
        ops.rms_norm_quantize(x, weight, 1e-6, torch.int8, residual=x, **options),
    ]


def test_rows_before_the_padding_are_quantized_as_ever(device: torch.device) -> None:
    torch.manual_seed(3)
    expected = quantizations(None, device)
    for real in (5, 2, 1):
        torch.manual_seed(3)
        found = quantizations(torch.tensor([real], dtype=torch.int32, device=device), device)
        for got, want in zip(found, expected, strict=True):
            for a, b in zip(got, want, strict=True):
                assert_same_bits(a[:real], b[:real])


@pytest.mark.parametrize(
    ("n_active", "error", "match"),
    [
        (torch.ones(1), TypeError, "n_active: got dtype torch.float32"),
        (torch.ones(2).int(), ValueError, "n_active: got shape"),
        (3, TypeError, "n_active: got int"),
    ],
)
def test_bad_n_active(n_active: Any, error: type[Exception], match: str) -> None:
    for call in (
        lambda: ops.quantize_per_token(X, torch.int8, n_active=n_active),
        lambda: ops.quantize_per_tensor(X, torch.ones(()), torch.int8, n_active=n_active),
        lambda: ops.silu_mul_quantize(X, torch.int8, n_active=n_active),
        lambda: ops.rms_norm_quantize(X, X[0], 1e-6, torch.int8, n_active=n_active),
    ):
        with pytest.raises(error, match=match):
            call()
