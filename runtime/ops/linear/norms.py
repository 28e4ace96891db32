"""RMS norm and layer norm, alone or fused with the quantisation that follows them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ..common import checks
from ..common.batch_invariant_rows import mean, mean_square
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
    return _normalize(_rms_norm_op, x, (weight, eps), residual, out, stream)


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
    static = (scale, zero_point, check_scales)
    return _quantize(
        _rms_norm_quantize_op, x, (weight, eps), residual, dtype, static, n_active, stream
    )


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    stream: checks.Stream = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Subtract each row's mean and divide by its deviation: (x - μ) / sqrt(σ² + eps) · weight.

    μ is the mean and σ² the mean of (x - μ)²; `bias`, if given, is added at last. With `residual`,
    the row is first x + residual, rounded to x's dtype (Ba, Kiros and Hinton, "Layer
    Normalization", 2016). On a GPU, from sm_80 on, this is one launch.

    Args:
        x: [M, K] bf16, fp16 or fp32, or [M, H, K]: H heads with weights of their own, adjacent in
            memory.
        weight: [K], or [H, K], of x's dtype or fp32.
        eps: added to the mean of squares, at least 0.
        bias: like weight.
        residual: like x, which has no heads then.
        out: of x's shape and dtype, written and returned; allocated when None.
        stream: see `ostinato.ops`.

    Returns:
        out, or (out, the sum x + residual) with `residual`; both of x's dtype.

    Raises:
        TypeError, ValueError: naming the argument, before anything is written.
    """
    if isinstance(x, torch.Tensor) and x.dim() == 3:
        _check_heads(x, weight, eps, bias, residual)
    else:
        check_layer_norm(x, weight, eps, bias, residual)
    if out is not None:
        checks.output("out", out, (x.dtype,), x.shape, x.device)
        _check_adjacent_heads("out", out)
    return _normalize(_layer_norm_op, x, (weight, bias, eps), residual, out, stream)


def layer_norm_quantize(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    dtype: torch.dtype,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    zero_point: torch.Tensor | None = None,
    check_scales: bool = False,
    n_active: torch.Tensor | None = None,
    stream: checks.Stream = None,
) -> tuple[torch.Tensor, ...]:
    """Do `layer_norm` of x [M, K], then quantise its fp32 result without rounding it in between.

    Quantisation is that of `quantize_per_token`, or with `scale` that of `quantize_per_tensor`,
    whose `dtype`, `scale`, `zero_point`, `check_scales` and `n_active` these are (the last counts
    for the sum, too); all else is as for `layer_norm`. On CUDA `weight` and `bias` are constants
    here: the kernel may read them while kernels before it on the stream are still running, so none
    of those may write them.

    Returns:
        (values [M, K] of `dtype`, scale [M] fp32), then the sum x + residual if `residual` was
        given. With `scale`, the second is the `scale_out` of `quantize_per_tensor`.

    Raises:
        TypeError, ValueError: naming the argument, before anything is written.
    """
    checks.option("dtype", dtype, checks.QUANTIZED_DTYPES)
    check_layer_norm(x, weight, eps, bias, residual)
    static = (scale, zero_point, check_scales)
    given = (weight, bias, eps)
    return _quantize(_layer_norm_quantize_op, x, given, residual, dtype, static, n_active, stream)


def _normalize(
    op: Callable[..., None],
    x: torch.Tensor,
    given: tuple[object, ...],
    residual: torch.Tensor | None,
    out: torch.Tensor | None,
    stream: checks.Stream,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Call the op of a norm with checked arguments; return what the norm returns."""
    with checks.launch_stream(stream, x.device):
        if out is None:
            out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        residual_out = sum_like(x, residual)
        op(x, *given, residual, out, residual_out)
    return out if residual_out is None else (out, residual_out)


def _quantize(
    op: Callable[..., None],
    x: torch.Tensor,
    given: tuple[object, ...],
    residual: torch.Tensor | None,
    dtype: torch.dtype,
    static: tuple[torch.Tensor | None, torch.Tensor | None, bool],
    n_active: torch.Tensor | None,
    stream: checks.Stream,
) -> tuple[torch.Tensor, ...]:
    """Check the rest, and call the op of a norm that quantises; return what that returns."""
    scale, zero_point, check_scales = static
    check_static(scale, zero_point, dtype, x.device)
    checks.flag("check_scales", check_scales)
    checks.active(n_active, x.device)
    with checks.launch_stream(stream, x.device):
        out = torch.empty(x.shape, dtype=dtype, device=x.device)
        scale_out = torch.empty(x.size(0), dtype=torch.float32, device=x.device)
        residual_out = sum_like(x, residual)
        op(x, *given, residual, *static, out, scale_out, residual_out, n_active)
    return (out, scale_out) if residual_out is None else (out, scale_out, residual_out)


def sum_like(x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor | None:
    """Return memory for x + residual, None without a residual."""
    return None if residual is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)


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


def check_layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
) -> None:
    """Check the arguments of `layer_norm` of rows without heads."""
    check_norm(x, weight, eps, residual)
    if bias is not None:
        checks.tensor("bias", bias, (weight.dtype,), (x.size(1),), x.device)


def _check_heads(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
) -> None:
    checks.tensor("x", x, checks.FLOAT_DTYPES, ("M", "H", "K"))
    checks.not_empty("x", x, "H", "K")
    checks.int32_sizes("x", (x.size(0) * x.size(1), x.size(2)), "M*H", "K")
    _check_adjacent_heads("x", x)
    checks.tensor("weight", weight, (x.dtype, torch.float32), x.shape[1:], x.device)
    checks.number("eps", eps, least=0.0)
    if bias is not None:
        checks.tensor("bias", bias, (weight.dtype,), x.shape[1:], x.device)
    for name, of_heads in (("weight", weight), ("bias", bias)):
        if of_heads is not None:
            _check_adjacent_heads(name, of_heads.unsqueeze(0))
    if residual is not None:
        raise ValueError("residual: got a tensor, expected None for x with heads")


def _check_adjacent_heads(name: str, x: torch.Tensor) -> None:
    if x.dim() == 3 and x.size(1) > 1 and x.stride(1) != x.size(2):
        raise ValueError(
            f"{name}: got strides {list(x.stride())}, expected heads {x.size(2)} elements apart"
        )


def normalized(
    kind: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    residual: torch.Tensor | None,
    residual_out: torch.Tensor | None,
) -> torch.Tensor:
    """Return the norm of x, or of x + residual, in fp32 by torch's operators."""
    if residual is not None and residual_out is not None:
        x = torch.add(x, residual, out=residual_out)
    rows = x.float().flatten(0, -2)
    if kind == "layer_norm":
        rows = rows - mean(rows)
    normed = (rows / (mean_square(rows) + eps).sqrt_()).view(x.shape).mul_(weight)
    return normed if bias is None else normed.add_(bias)


def normalize_into(
    kind: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    residual: torch.Tensor | None,
    out: torch.Tensor,
    residual_out: torch.Tensor | None,
) -> None:
    if has_kernel(Quantize, x):
        quantize_rows(
            kind,
            x,
            None,
            None,
            out,
            None,
            residual=residual,
            residual_out=residual_out,
            norm_weight=weight,
            norm_bias=bias,
            eps=eps,
        )
        return
    out.copy_(normalized(kind, x, weight, bias, eps, residual, residual_out))


def normalize_and_quantize(
    kind: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
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
    """Do `rms_norm_quantize` or `layer_norm_quantize`, the kind says which, into the outputs.

    The arguments are checked.
    """
    check_static_values(scale, zero_point, check_scales)
    if has_kernel(Quantize, x):
        quantize_rows(
            kind,
            x,
            scale,
            zero_point,
            out,
            scale_out,
            residual=residual,
            residual_out=residual_out,
            norm_weight=weight,
            norm_bias=bias,
            eps=eps,
            n_active=n_active,
        )
        return
    rows = normalized(kind, x, weight, bias, eps, residual, residual_out)
    quantize_into(rows, scale, zero_point, out, scale_out)


def as_rms_norm(implementation: Callable[..., None]) -> Callable[..., None]:
    """Return an implementation for norms of any kind as that of an op without a bias."""

    def call(x: torch.Tensor, weight: torch.Tensor, eps: float, *more: Any) -> None:
        implementation("rms_norm", x, weight, None, eps, *more)

    return call


_rms_norm_op = register(
    "rms_norm(Tensor x, Tensor weight, float eps, Tensor? residual, Tensor(a!) out, "
    "Tensor(b!)? residual_out) -> ()",
    as_rms_norm(normalize_into),
)
_rms_norm_quantize_op = register(
    "rms_norm_quantize(Tensor x, Tensor weight, float eps, Tensor? residual, Tensor? scale, "
    "Tensor? zero_point, bool check_scales, Tensor(a!) out, Tensor(b!)? scale_out, "
    "Tensor(c!)? residual_out, Tensor? n_active=None) -> ()",
    as_rms_norm(normalize_and_quantize),
)
_layer_norm_op = register(
    "layer_norm(Tensor x, Tensor weight, Tensor? bias, float eps, Tensor? residual, "
    "Tensor(a!) out, Tensor(b!)? residual_out) -> ()",
    partial(normalize_into, "layer_norm"),
)
_layer_norm_quantize_op = register(
    "layer_norm_quantize(Tensor x, Tensor weight, Tensor? bias, float eps, Tensor? residual, "
    "Tensor? scale, Tensor? zero_point, bool check_scales, Tensor(a!) out, Tensor(b!)? scale_out, "
    "Tensor(c!)? residual_out, Tensor? n_active=None) -> ()",
    partial(normalize_and_quantize, "layer_norm"),
)
