"""NaN and static INT8, which has no code for it: the scale of its row is NaN, and its results."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ops_cases import E4M3, FLOATS, assert_same_bits

from ostinato import ops
from ostinato.ops import reference

pytestmark = pytest.mark.usefixtures("kernels")

Quantized = tuple[torch.Tensor, torch.Tensor]
# Of x, scale, dtype and zero point: values and scales. x has twice the columns for a gate.
Quantizer = Callable[[torch.Tensor, torch.Tensor, torch.dtype, torch.Tensor | None], Quantized]


def per_tensor(
    x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, zero: torch.Tensor | None
) -> Quantized:
    scales = torch.full((len(x),), 99.0, device=x.device)
    values = ops.quantize_per_tensor(x, scale, dtype, zero_point=zero, scale_out=scales)
    assert_same_bits(values, ops.quantize_per_tensor(x, scale, dtype, zero_point=zero))
    return values, scales


def rms_norm(
    x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, zero: torch.Tensor | None
) -> Quantized:
    options = {"scale": scale, "zero_point": zero}
    plain = ops.rms_norm_quantize(x, torch.ones_like(x[0]), 1e-6, dtype, **options)
    zeros = torch.zeros_like(x)
    values, scales, _ = ops.rms_norm_quantize(
        x, torch.ones_like(x[0]), 1e-6, dtype, residual=zeros, **options
    )
    torch.testing.assert_close(values.float(), plain[0].float(), rtol=0, atol=0, equal_nan=True)
    assert_same_bits(scales, plain[1])
    return values, scales


def silu_mul(
    x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, zero: torch.Tensor | None
) -> Quantized:
    values, scales = ops.silu_mul_quantize(x, dtype, scale=scale, zero_point=zero)
    discarding = {"scale": scale, "zero_point": zero, "discard_x": True}
    again = ops.silu_mul_quantize(x.clone(), dtype, **discarding)
    assert_same_bits(again[0], values)
    assert_same_bits(again[1], scales)
    return values, scales


QUANTIZERS: dict[str, Quantizer] = {
    "per_tensor": per_tensor,
    "rms_norm": rms_norm,
    "silu_mul": silu_mul,
}
# (m, k): one for every way in which a kernel shares rows among warps, CTAs and clusters.
SHAPES = [(1, 1), (5, 33), (70, 256), (300, 1000), (3, 4096), (400, 4096), (1030, 4096)]
SHAPES += [(270, 8192), (2, 14336), (20, 14336), (140, 14336), (2, 20000), (2, 40000)]
BROKEN = [0, -1]  # columns with a NaN, each in rows of its own


def rows(name: str, m: int, k: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.randn(m, 2 * k if name == "silu_mul" else k).to(device, dtype)


def zero_point(asymmetric: bool, device: torch.device) -> torch.Tensor | None:
    return torch.tensor(-7, dtype=torch.int32, device=device) if asymmetric else None


@pytest.mark.parametrize("asymmetric", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("x_dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", QUANTIZERS)
def test_scale_is_nan_for_int8_rows_with_a_nan(
    name: str,
    x_dtype: torch.dtype,
    shape: tuple[int, int],
    asymmetric: bool,
    device: torch.device,
) -> None:
    m, k = shape
    quantize, zero = QUANTIZERS[name], zero_point(asymmetric, device)
    scale = torch.tensor([0.02], device=device)
    x = rows(name, m, k, x_dtype, device)
    expected, scales = quantize(x, scale, torch.int8, zero)
    assert_same_bits(scales, scale.expand(m).clone())
    broken = sorted({0, m // 2, m - 1})
    for row, column in zip(broken, [-1, 0, k // 2], strict=False):
        x[row, column] = math.nan
    values, scales = quantize(x, scale, torch.int8, zero)
    assert scales[broken].isnan().all()
    whole = torch.ones(m, dtype=torch.bool, device=device)
    whole[broken] = False
    assert_same_bits(scales[whole], scale.expand(m)[whole].clone())
    assert_same_bits(values[whole], expected[whole])


@given(
    st.lists(st.floats(width=16), min_size=2, max_size=30),
    st.sampled_from(sorted(QUANTIZERS)),
    st.sampled_from([0.02, 3.0]),
)
def test_scales_are_those_of_the_reference(numbers: list[float], name: str, factor: float) -> None:
    x = torch.tensor([numbers, numbers[::-1]])[:, : len(numbers) // 2 * 2]
    scale = torch.tensor(factor)
    _, scales = QUANTIZERS[name](x, scale, torch.int8, None)
    ones = torch.ones_like(x[0])
    normalized = reference.rms_norm_quantize(x, ones, 1e-6, torch.int8, scale=scale)
    expected = {
        "per_tensor": reference.static_scales(x, scale, torch.int8),
        "rms_norm": normalized[1],
        "silu_mul": reference.silu_mul_quantize(x, torch.int8, scale=scale)[1],
    }[name]
    assert_same_bits(scales, expected)


@pytest.mark.parametrize("name", QUANTIZERS)
def test_nan_of_a_norm_weight_or_an_up_half_counts(name: str, device: torch.device) -> None:
    scale = torch.tensor(0.02, device=device)
    x = torch.randn(3, 64, device=device)
    if name == "rms_norm":
        weight = torch.ones(64, device=device)
        weight[40] = math.nan
        _, scales = ops.rms_norm_quantize(x, weight, 1e-6, torch.int8, scale=scale)
        assert scales.isnan().all()
        residual = torch.zeros_like(x)
        residual[1, 3] = math.nan
        given = {"scale": scale, "residual": residual}
        _, scales, _ = ops.rms_norm_quantize(x, torch.ones_like(x[0]), 1e-6, torch.int8, **given)
    else:
        x[1, 63] = math.nan
        _, scales = QUANTIZERS[name](x, scale, torch.int8, None)
    assert scales[1].isnan()
    assert scales[[0, 2]].tolist() == [scale.item()] * 2


@pytest.mark.parametrize("x_dtype", FLOATS, ids=str)
def test_infinities_saturate_and_keep_the_scale(x_dtype: torch.dtype, device: torch.device) -> None:
    one = torch.ones((), device=device)
    x = torch.tensor([[math.inf, -math.inf, 1.0, 0.0]], device=device, dtype=x_dtype)
    values, scales = per_tensor(x, one, torch.int8, None)
    assert values.tolist() == [[127, -128, 1, 0]]
    assert scales.tolist() == [1.0]
    gated = torch.cat([torch.ones_like(x), x], dim=1)
    values, scales = silu_mul(gated, one, torch.int8, None)
    assert values.tolist() == [[127, -128, 1, 0]]
    assert scales.tolist() == [1.0]


@pytest.mark.parametrize("name", QUANTIZERS)
def test_fp8_keeps_its_scale_and_shows_nan_by_its_code(name: str, device: torch.device) -> None:
    scale = torch.tensor(0.02, device=device)
    x = rows(name, 4, 64, torch.bfloat16, device)
    x[2, 5] = math.nan
    values, scales = QUANTIZERS[name](x, scale, E4M3, None)
    assert scales.tolist() == [scale.item()] * 4
    assert values.float().isnan().any(1).tolist() == [False, False, True, False]


# Rows for each kernel that multiplies, and for each of its ways to read scales.
@pytest.mark.parametrize("m", [1, 3, 17, 70, 300])
@pytest.mark.parametrize("asymmetric", [False, True])
@pytest.mark.parametrize("out_dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", QUANTIZERS)
def test_product_of_a_row_with_nan_is_nan_in_every_channel(
    name: str, out_dtype: torch.dtype, asymmetric: bool, m: int, device: torch.device
) -> None:
    k, n = 96, 72
    quantize, zero = QUANTIZERS[name], zero_point(asymmetric, device)
    scale = torch.tensor(0.02, device=device)
    w = ops.pack_weight(torch.randint(-127, 128, (n, k), dtype=torch.int8).to(device))
    w_scale = torch.rand(n).to(device)
    w_scale[7] = 0.0
    bias = torch.randn(n).to(device, out_dtype)

    def product(x: torch.Tensor, by_row: bool = True) -> torch.Tensor:
        values, scales = quantize(x, scale, torch.int8, zero)
        given = {"bias": bias, "x_zero_point": zero, "out_dtype": out_dtype}
        return ops.w8a8_linear(values, w, scales if by_row else scale, w_scale, **given)

    x = rows(name, m, k, torch.bfloat16, device)
    expected = product(x)
    assert expected.isfinite().all()
    assert_same_bits(expected, product(x, by_row=False))
    broken = sorted({0, m // 2, m - 1})
    for row, column in zip(broken, BROKEN, strict=False):
        x[row, column] = math.nan
    found = product(x)
    hit = x.isnan().any(1)
    assert found[hit].isnan().all()
    assert_same_bits(found[~hit], expected[~hit])


def test_padding_and_nan_do_not_meet(device: torch.device) -> None:
    x, scale = torch.randn(5, 64, device=device), torch.tensor(0.02, device=device)
    x[3:] = math.nan
    real = torch.tensor([3], dtype=torch.int32, device=device)
    scales = torch.zeros(5, device=device)
    ops.quantize_per_tensor(x, scale, torch.int8, n_active=real, scale_out=scales)
    assert scales[:3].tolist() == [scale.item()] * 3


@pytest.mark.parametrize(
    ("scale_out", "error", "match"),
    [
        (torch.zeros(3), ValueError, r"scale_out: got shape \[3\], expected \[2\]"),
        (torch.zeros(1).expand(2), ValueError, "scale_out: got strides"),
        (torch.zeros(2).half(), TypeError, "scale_out: got dtype torch.float16"),
        (1.0, TypeError, "scale_out: got float"),
    ],
)
def test_bad_scale_out(scale_out: torch.Tensor, error: type[Exception], match: str) -> None:
    x, out = torch.zeros(2, 4), torch.full((2, 4), 7, dtype=torch.int8)
    with pytest.raises(error, match=match):
        ops.quantize_per_tensor(x, torch.ones(()), torch.int8, out=out, scale_out=scale_out)
    assert (out == 7).all()
