"""RMS norm, alone or fused with the quantisation that follows it."""

from __future__ import annotations

import torch

from ..common import checks
from ..common.batch_invariant_rows import mean_square
from ..common.device import has_kernel
from ..common.torch_library import register
from .quantize import check_static, check_static_values, quantize_into
from .quantize_cuda import Quantize, quantize_rows


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    stream: checks.Stream = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Divide each row by its root mean square: x / sqrt(mean(x²) + eps) · weight.

    With `residual`, the row is first x + residual, rounded to x's dtype (Zhang and Sennrich, "Root
    Mean Square Layer Normalization", 2019, in the pre-norm residual block).

    On a GPU, from sm_80 on, this is one launch.

    Args:
        x: [M, K] bf16, fp16 or fp32.
        weight: [K] of x's dtype or fp32.
        eps: added to the mean of squares, at least 0.
        residual: [M, K] of x's dtype.
        out: [M, K] of x's dtype, written and returned; allocated when None.
        stream: see `ostinato.ops`.

    Returns:
        out, or (out, the sum x + residual) with `residual`; both of x's dtype.

    Raises:
        TypeError, ValueError: naming the argument, before anything is written.
    """
    check_norm(x, weight, eps, residual)
    if out is not None:
        checks.output("out", out, (x.dtype,), x.shape, x.device)
    with checks.launch_stream(stream, x.device):
        if out is None:
            out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if residual is None:
            _rms_norm_op(x, weight, eps, None, out, None)
            return out
        residual_out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        _rms_norm_op(x, weight, eps, residual, out, residual_out)
    return out, residual_out


def rms_norm_quantize(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    dtype: torch.dtype,
    *,
    residual: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    zero_point: torch.Tensor | None = None,
    check_scales: bool = False,
    n_active: torch.Tensor | None = None,
    stream: checks.Stream = None,
) -> tuple[torch.Tensor, ...]:
    """Do `rms_norm`, then quantise its fp32 result without rounding it in between.

    Quantisation is that of `quantize_per_token`, or with `scale` that of `quantize_per_tensor`,
    whose `dtype`, `scale`, `zero_point`, `check_scales` and `n_active` these are (the last counts
    for the sum, too); all else is as for `rms_norm`. On CUDA `weight` is a constant here: the
    kernel may read it while kernels before it on the stream are still running, so none of those may
    write it.

    Returns:
        (values [M, K] of `dtype`, scale [M] fp32), then the sum x + residual if `residual` was
        given. With `scale`, the second is the `scale_out` of `quantize_per_tensor`.

    Raises:
        TypeError, ValueError: naming the argument, before anything is written.
    """
    checks.option("dtype", dtype, checks.QUANTIZED_DTYPES)
    check_norm(x, weight, eps, residual)
    check_static(scale, zero_point, dtype, x.device)
    checks.flag("check_scales", check_scales)
    checks.active(n_active, x.device)
    with checks.launch_stream(stream, x.device):
        out = torch.empty(x.shape, dtype=dtype, device=x.device)
        scale_out = torch.empty(x.size(0), dtype=torch.float32, device=x.device)
        residual_out = None
        if residual is not None:
            residual_out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        outputs = (out, scale_out, residual_out)
        _rms_norm_quantize_op(
            x, weight, eps, residual, scale, zero_point, check_scales, *outputs, n_active
        )
    return (out, scale_out) if residual_out is None else (out, scale_out, residual_out)


def check_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None
) -> None:
    """Check the arguments of `rms_norm`."""
    checks.tensor("x", x, checks.FLOAT_DTYPES, ("M", "K"))
    checks.not_empty("x", x, "K")
    checks.int32_sizes("x", x.shape, "M", "K")
    checks.tensor("weight", weight, (x.dtype, torch.float32), (x.size(1),), x.device)
    checks.number("eps", eps, least=0.0)
    if residual is not None:
        checks.tensor("residual", residual, (x.dtype,), x.shape, x.device)


def normalized(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None,
    residual_out: torch.Tensor | None,
) -> torch.Tensor:
    """Return the norm of x, or of x + residual, in fp32 by torch's operators."""
    if residual is not None and residual_out is not None:
        x = torch.add(x, residual, out=residual_out)
    rows = x.float()
    return (rows / (mean_square(rows) + eps).sqrt_()).mul_(weight)


def _rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None,
    out: torch.Tensor,
    residual_out: torch.Tensor | None,
) -> None:
    if has_kernel(Quantize, x):
        quantize_rows(
            "rms_norm",
            x,
            None,
            None,
            out,
            None,
            residual=residual,
            residual_out=residual_out,
            norm_weight=weight,
            eps=eps,
        )
        return
    out.copy_(normalized(x, weight, eps, residual, residual_out))


def normalize_and_quantize(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None,
    scale: torch.Tensor | None,
    zero_point: torch.Tensor | None,
    check_scales: bool,
    out: torch.Tensor,
    scale_out: torch.Tensor | None,
    residual_out: torch.Tensor | None,
    n_active: torch.Tensor | None = None,
) -> None:
    """Do `rms_norm_quantize` with checked arguments, into `out`, `scale_out`, `residual_out`."""
    check_static_values(scale, zero_point, check_scales)
    if has_kernel(Quantize, x):
        quantize_rows(
            "rms_norm",
            x,
            scale,
            zero_point,
            out,
            scale_out,
            residual=residual,
            residual_out=residual_out,
            norm_weight=weight,
            eps=eps,
            n_active=n_active,
        )
        return
    rows = normalized(x, weight, eps, residual, residual_out)
    quantize_into(rows, scale, zero_point, out, scale_out)


_rms_norm_op = register(
    "rms_norm(Tensor x, Tensor weight, float eps, Tensor? residual, Tensor(a!) out, "
    "Tensor(b!)? residual_out) -> ()",
    _rms_norm,
)
_rms_norm_quantize_op = register(
    "rms_norm_quantize(Tensor x, Tensor weight, float eps, Tensor? residual, Tensor? scale, "
    "Tensor? zero_point, bool check_scales, Tensor(a!) out, Tensor(b!)? scale_out, "
    "Tensor(c!)? residual_out, Tensor? n_active=None) -> ()",
    normalize_and_quantize,
)
