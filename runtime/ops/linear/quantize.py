"""Quantisation of activations to INT8 or FP8 (e4m3), per token or with a fixed scale."""

from __future__ import annotations

import torch

from ..common import checks
from ..common.device import has_kernel
from ..common.torch_library import register
from .quantize_cuda import Quantize, quantize_rows

# What a dynamic scale maps a row's largest magnitude to. Of int8, -128 is left out: the grid is
# symmetric.
GRID_MAX = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}

# A scale this small still has a finite reciprocal, and no 8-bit grid over it is subnormal.
SMALLEST_SCALE = torch.finfo(torch.float32).tiny


def dynamic_scale(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the scale [...] that maps the largest magnitude of each row of x [..., K] to the grid.

    It is amax / `GRID_MAX`, and the smallest normal fp32 number for a row of zeros.
    """
    amax = x.abs().amax(-1)
    # On CUDA torch turns division by a Python number into multiplication by its rounded inverse.
    return (amax / torch.full_like(amax, GRID_MAX[dtype])).clamp_min_(SMALLEST_SCALE)


def encode(
    x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, zero_point: torch.Tensor | None = None
) -> torch.Tensor:
    """Return x / scale (+ zero_point) on the grid of `dtype`: to nearest, ties to even, saturated.

    `x` is fp32 and `scale` broadcasts against it. The INT8 grid is -128..127, of which codes by a
    row's own dynamic scale leave out -128.
    """
    grid = x / scale
    limit = GRID_MAX[dtype]
    if dtype is torch.float8_e4m3fn:
        return grid.clamp_(-limit, limit).to(dtype)
    grid = grid.round_()
    if zero_point is not None:
        grid += zero_point
    return grid.clamp_(-limit - 1, limit).to(dtype)


def quantize_per_token(
    x: torch.Tensor,
    dtype: torch.dtype,
    *,
    n_active: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    scale_out: torch.Tensor | None = None,
    stream: checks.Stream = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise each row of x with a scale of its own.

    scale = amax(|row|) / 127 for int8, / 448 for e4m3 (a row of zeros gets the smallest normal
    fp32 number); values = row / scale, rounded to nearest, ties to even, saturated to ±127 or ±448.
    (Dynamic int8 scales of compressed-tensors are amax / 127.5.)

    Args:
        x: [M, K] bf16, fp16 or fp32.
        dtype: torch.int8 or torch.float8_e4m3fn.
        n_active: int32 [1], how many rows of x are real: those after them are padding, whose
            results mean nothing. On CUDA they are left out; it is read while kernels before this
            one are still running, so none of those may write it.
        out: [M, K] of `dtype`, written and returned; allocated when None.
        scale_out: [M] fp32, likewise.
        stream: see `ostinato.ops`.

    Returns:
        (values [M, K] of `dtype`, scale [M] fp32) with x ≈ values · scale.

    Raises:
        TypeError, ValueError: naming the argument, before anything is written.
    """
    check_input(x, dtype)
    checks.active(n_active, x.device)
    if out is not None:
        checks.output("out", out, (dtype,), x.shape, x.device)
    if scale_out is not None:
        checks.output("scale_out", scale_out, (torch.float32,), (x.size(0),), x.device)
    with checks.launch_stream(stream, x.device):
        if out is None:
            out = torch.empty(x.shape, dtype=dtype, device=x.device)
        if scale_out is None:
            scale_out = torch.empty(x.size(0), dtype=torch.float32, device=x.device)
        _quantize_per_token_op(x, out, scale_out, n_active)
    return out, scale_out


def quantize_per_tensor(
    x: torch.Tensor,
    scale: torch.Tensor,
    dtype: torch.dtype,
    *,
    zero_point: torch.Tensor | None = None,
    check_scales: bool = False,
    n_active: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    scale_out: torch.Tensor | None = None,
    stream: checks.Stream = None,
) -> torch.Tensor:
    """Quantise x with one fixed scale.

    values = round(x / scale) + zero_point, ties to even, saturated to -128..127, for int8, or
    x / scale saturated to ±448 and rounded for e4m3.

    int8 has no code for NaN. `scale_out` shows it: passed to `w8a8_linear` as `x_scale`, it makes
    the results of a row that holds a NaN NaN, where those by `scale` itself are finite.

    Args:
        x: [M, K] bf16, fp16 or fp32.
        scale: fp32 scalar tensor (0-d or [1]), positive.
        dtype: torch.int8 or torch.float8_e4m3fn.
        zero_point: int32 scalar tensor in -128..127, int8 only: asymmetric quantisation. Another
            number is refused on the CPU, on CUDA with `check_scales`.
        check_scales: for debugging: wait for the device, and refuse a scale that is not positive
            and finite, or a zero point out of range.
        n_active: as of `quantize_per_token`.
        out: [M, K] of `dtype`, written and returned; allocated when None.
        scale_out: [M] fp32, written: `scale`, and for an int8 row that holds a NaN, NaN.
        stream: see `ostinato.ops`.

    Returns:
        values [M, K] of `dtype`, with x ≈ (values - zero_point) · scale.

    Raises:
        TypeError, ValueError: naming the argument, before anything is written.
    """
    check_input(x, dtype)
    checks.scalar("scale", scale, torch.float32, x.device)
    check_zero_point(zero_point, dtype, x.device)
    checks.flag("check_scales", check_scales)
    checks.active(n_active, x.device)
    if out is not None:
        checks.output("out", out, (dtype,), x.shape, x.device)
    if scale_out is not None:
        checks.output("scale_out", scale_out, (torch.float32,), (x.size(0),), x.device)
    with checks.launch_stream(stream, x.device):
        if out is None:
            out = torch.empty(x.shape, dtype=dtype, device=x.device)
        _quantize_per_tensor_op(x, scale, zero_point, check_scales, out, n_active, scale_out)
    return out


def check_static(
    scale: torch.Tensor | None,
    zero_point: torch.Tensor | None,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Check the scale and zero point of static quantisation; None for both means dynamic."""
    if scale is not None:
        checks.scalar("scale", scale, torch.float32, device)
    check_zero_point(zero_point, dtype, device)
    if scale is None and zero_point is not None:
        raise ValueError("zero_point: got a tensor without a scale, expected both or neither")


def check_zero_point(
    zero_point: torch.Tensor | None, dtype: torch.dtype, device: torch.device
) -> None:
    """Check the form of a zero point; None is symmetric quantisation."""
    if zero_point is None:
        return
    if dtype is not torch.int8:
        raise ValueError(f"zero_point: got a tensor, expected None for {dtype}")
    checks.scalar("zero_point", zero_point, torch.int32, device)


def check_static_values(
    scale: torch.Tensor | None, zero_point: torch.Tensor | None, check_scales: bool
) -> None:
    """Check the numbers in the tensors that passed `check_static`, as `check_scales` says."""
    if check_scales:
        checks.positive_scale("scale", scale)
    checks.zero_points("zero_point", zero_point, wait=check_scales)


def quantize_into(
    x: torch.Tensor,
    scale: torch.Tensor | None,
    zero_point: torch.Tensor | None,
    out: torch.Tensor,
    scale_out: torch.Tensor | None,
) -> None:
    """Quantise x [M, K] fp32 into `out`, by `scale` or else per token; `scale_out` [M] gets it."""
    scales = dynamic_scale(x, out.dtype) if scale is None else _static_scales(x, scale, out.dtype)
    if scale_out is not None:
        scale_out.copy_(scales)
    divisor = scales.unsqueeze(1) if scale is None else scale
    out.copy_(encode(x, divisor, out.dtype, zero_point))


def _static_scales(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    scales = scale.expand(x.size(0))
    return scales.masked_fill(x.isnan().any(1), torch.nan) if dtype is torch.int8 else scales


def check_input(x: torch.Tensor, dtype: torch.dtype) -> None:
    """Check x [M, K], and what it is to be quantised to."""
    checks.tensor("x", x, checks.FLOAT_DTYPES, ("M", "K"))
    checks.not_empty("x", x, "K")
    checks.int32_sizes("x", x.shape, "M", "K")
    checks.option("dtype", dtype, checks.QUANTIZED_DTYPES)


def quantize_tokens(
    x: torch.Tensor,
    out: torch.Tensor,
    scale_out: torch.Tensor,
    n_active: torch.Tensor | None = None,
) -> None:
    """Do `quantize_per_token` with checked arguments, into `out` and `scale_out`."""
    if has_kernel(Quantize, x):
        quantize_rows("per_token", x, None, None, out, scale_out, n_active=n_active)
    else:
        quantize_into(x.float(), None, None, out, scale_out)


def _quantize_per_tensor(
    x: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor | None,
    check_scales: bool,
    out: torch.Tensor,
    n_active: torch.Tensor | None = None,
    scale_out: torch.Tensor | None = None,
) -> None:
    check_static_values(scale, zero_point, check_scales)
    if has_kernel(Quantize, x):
        quantize_rows("per_token", x, scale, zero_point, out, scale_out, n_active=n_active)
    else:
        quantize_into(x.float(), scale, zero_point, out, scale_out)


_quantize_per_token_op = register(
    "quantize_per_token(Tensor x, Tensor(a!) out, Tensor(b!) scale_out, "
    "Tensor? n_active=None) -> ()",
    quantize_tokens,
)
_quantize_per_tensor_op = register(
    "quantize_per_tensor(Tensor x, Tensor scale, Tensor? zero_point, bool check_scales, "
    "Tensor(a!) out, Tensor? n_active=None, Tensor(b!)? scale_out=None) -> ()",
    _quantize_per_tensor,
)
