"""Asymmetric quantisation of rows to INT8: alone, or after a norm or an activation function."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from ..common import checks
from ..common.device import has_kernel
from ..common.torch_library import register
from .activation import activated, check_activation
from .norms import as_rms_norm, check_layer_norm, check_norm, normalized, sum_like
from .quantize import SMALLEST_SCALE, check_input, encode
from .quantize_cuda import Quantize, quantize_rows


def quantize_asymmetric(
    x: torch.Tensor,
    *,
    n_active: torch.Tensor | None = None,
    stream: checks.Stream = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Quantise each row of x to INT8 with a scale and a zero point of its own.

    With low = min(row, 0) and high = max(row, 0): scale = (high - low) / 255 (a row of zeros gets
    the smallest normal fp32 number); zero_point = -128 - low / scale, rounded, from -128 to 127;
    values = round(row / scale) + zero_point, saturated to -128..127. Ties go to even. A row with a
    NaN, or whose range is beyond fp32, has a scale that is no finite number, and the zero point
    -128. Source: `calculate_qparams` of compressed-tensors.

    Args:
        x: [M, K] bf16, fp16 or fp32.
        n_active: as of `quantize_per_token`.
        stream: see `ostinato.ops`.

    Returns:
        (values [M, K] int8, scale [M] fp32, zero_point [M] int32) with
        x ≈ (values - zero_point) · scale.

    Raises:
        TypeError, ValueError: naming the argument, before anything is written.
    """
    check_input(x, torch.int8)
    checks.active(n_active, x.device)
    with checks.launch_stream(stream, x.device):
        results = _outputs(x.size(0), x.size(1), x.device)
        _quantize_asymmetric_op(x, *results, n_active)
    return results


def rms_norm_quantize_asymmetric(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    residual: torch.Tensor | None = None,
    n_active: torch.Tensor | None = None,
    stream: checks.Stream = None,
) -> tuple[torch.Tensor, ...]:
    """Do `rms_norm`, then `quantize_asymmetric` with its fp32 result, not rounded in between.

    All else is as for `rms_norm_quantize`.

    Returns:
        (values [M, K] int8, scale [M] fp32, zero_point [M] int32), then the sum x + residual if
        `residual` was given.

    Raises:
        TypeError, ValueError: naming the argument, before anything is written.
    """
    check_norm(x, weight, eps, residual)
    given = (weight, eps)
    return _normalize_and_quantize(
        _rms_norm_quantize_asymmetric_op, x, given, residual, n_active, stream
    )


def layer_norm_quantize_asymmetric(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    n_active: torch.Tensor | None = None,
    stream: checks.Stream = None,
) -> tuple[torch.Tensor, ...]:
    """Do `layer_norm` of x [M, K], then `quantize_asymmetric` with its fp32 result.

    The result is not rounded in between. All else is as for `layer_norm_quantize`.

    Returns:
        (values [M, K] int8, scale [M] fp32, zero_point [M] int32), then the sum x + residual if
        `residual` was given.

    Raises:
        TypeError, ValueError: naming the argument, before anything is written.
    """
    check_layer_norm(x, weight, eps, bias, residual)
    given = (weight, bias, eps)
    return _normalize_and_quantize(
        _layer_norm_quantize_asymmetric_op, x, given, residual, n_active, stream
    )


def _normalize_and_quantize(
    op: Callable[..., None],
    x: torch.Tensor,
    given: tuple[object, ...],
    residual: torch.Tensor | None,
    n_active: torch.Tensor | None,
    stream: checks.Stream,
) -> tuple[torch.Tensor, ...]:
    """Check the rest, and call the op of a norm; return what the norm returns."""
    checks.active(n_active, x.device)
    with checks.launch_stream(stream, x.device):
        results = _outputs(x.size(0), x.size(1), x.device)
        total = sum_like(x, residual)
        op(x, *given, residual, *results, total, n_active)
    return results if total is None else (*results, total)


def activation_quantize_asymmetric(
    x: torch.Tensor,
    kind: str,
    *,
    n_active: torch.Tensor | None = None,
    discard_x: bool = False,
    stream: checks.Stream = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Do `activation`, then `quantize_asymmetric` with its fp32 result.

    The result is not rounded in between. All else is as for `activation_quantize`.

    Returns:
        (values [M, K] int8, scale [M] fp32, zero_point [M] int32).

    Raises:
        TypeError, ValueError: naming the argument, before anything is written.
    """
    rows, columns = check_activation(x, kind, discard_x=discard_x)
    checks.active(n_active, x.device)
    quantize = _activation_quantize_asymmetric_op
    if discard_x:
        quantize = _activation_quantize_asymmetric_discarding_op
    with checks.launch_stream(stream, x.device):
        results = _outputs(rows, columns, x.device)
        quantize(x, kind, *results, n_active)
    return results


def _outputs(
    rows: int, k: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return (
        torch.empty((rows, k), dtype=torch.int8, device=device),
        torch.empty(rows, dtype=torch.float32, device=device),
        torch.empty(rows, dtype=torch.int32, device=device),
    )


def _quantize_into(
    x: torch.Tensor, out: torch.Tensor, scale_out: torch.Tensor, zero_point_out: torch.Tensor
) -> None:
    """Quantise x [M, K] fp32 by torch's operators."""
    low, high = (bound.unsqueeze(1) for bound in x.aminmax(dim=1))
    width = high.clamp(min=0.0) - low.clamp(max=0.0)
    # On CUDA torch turns division by a Python number into multiplication by its rounded inverse.
    scale = (width / torch.full_like(width, 255.0)).clamp(min=SMALLEST_SCALE)
    # NaN becomes -128: the scale shows it.
    zero_point = (-128.0 - low.clamp(max=0.0) / scale).nan_to_num(-128.0).round()
    zero_point = zero_point.clamp(-128.0, 127.0).to(torch.int32)
    out.copy_(encode(x, scale, torch.int8, zero_point))
    scale_out.copy_(scale.squeeze(1))
    zero_point_out.copy_(zero_point.squeeze(1))


def _quantize_asymmetric(
    x: torch.Tensor,
    out: torch.Tensor,
    scale_out: torch.Tensor,
    zero_point_out: torch.Tensor,
    n_active: torch.Tensor | None = None,
) -> None:
    if has_kernel(Quantize, x):
        quantize_rows(
            *("per_token", x, None, None, out, scale_out),
            zero_point_out=zero_point_out,
            n_active=n_active,
        )
    else:
        _quantize_into(x.float(), out, scale_out, zero_point_out)


def _norm_quantize_asymmetric(
    kind: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    residual: torch.Tensor | None,
    out: torch.Tensor,
    scale_out: torch.Tensor,
    zero_point_out: torch.Tensor,
    residual_out: torch.Tensor | None,
    n_active: torch.Tensor | None = None,
) -> None:
    if has_kernel(Quantize, x):
        quantize_rows(
            kind,
            x,
            None,
            None,
            out,
            scale_out,
            zero_point_out=zero_point_out,
            residual=residual,
            residual_out=residual_out,
            norm_weight=weight,
            norm_bias=bias,
            eps=eps,
            n_active=n_active,
        )
    else:
        rows = normalized(kind, x, weight, bias, eps, residual, residual_out)
        _quantize_into(rows, out, scale_out, zero_point_out)


def _activation_quantize_asymmetric(
    x: torch.Tensor,
    kind: str,
    out: torch.Tensor,
    scale_out: torch.Tensor,
    zero_point_out: torch.Tensor,
    n_active: torch.Tensor | None = None,
    *,
    discard_x: bool = False,
) -> None:
    if has_kernel(Quantize, x):
        quantize_rows(
            kind,
            x,
            None,
            None,
            out,
            scale_out,
            zero_point_out=zero_point_out,
            n_active=n_active,
            discard_x=discard_x,
        )
    else:
        _quantize_into(activated(x, kind), out, scale_out, zero_point_out)
        if discard_x:
            x.fill_(torch.nan)


_quantize_asymmetric_op = register(
    "quantize_asymmetric(Tensor x, Tensor(a!) out, Tensor(b!) scale_out, "
    "Tensor(c!) zero_point_out, Tensor? n_active=None) -> ()",
    _quantize_asymmetric,
)
_rms_norm_quantize_asymmetric_op = register(
    "rms_norm_quantize_asymmetric(Tensor x, Tensor weight, float eps, Tensor? residual, "
    "Tensor(a!) out, Tensor(b!) scale_out, Tensor(c!) zero_point_out, Tensor(d!)? residual_out, "
    "Tensor? n_active=None) -> ()",
    as_rms_norm(_norm_quantize_asymmetric),
)
_layer_norm_quantize_asymmetric_op = register(
    "layer_norm_quantize_asymmetric(Tensor x, Tensor weight, Tensor? bias, float eps, "
    "Tensor? residual, Tensor(a!) out, Tensor(b!) scale_out, Tensor(c!) zero_point_out, "
    "Tensor(d!)? residual_out, Tensor? n_active=None) -> ()",
    partial(_norm_quantize_asymmetric, "layer_norm"),
)
_activation_quantize_asymmetric_op = register(
    "activation_quantize_asymmetric(Tensor x, str kind, Tensor(a!) out, Tensor(b!) scale_out, "
    "Tensor(c!) zero_point_out, Tensor? n_active=None) -> ()",
    _activation_quantize_asymmetric,
)
_activation_quantize_asymmetric_discarding_op = register(
    "activation_quantize_asymmetric_discarding(Tensor(a!) x, str kind, Tensor(b!) out, "
    "Tensor(c!) scale_out, Tensor(d!) zero_point_out, Tensor? n_active=None) -> ()",
    partial(_activation_quantize_asymmetric, discard_x=True),
)
