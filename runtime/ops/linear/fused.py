"""W8A8 linear layers together with what makes their activations: quantisation, and RMS norm."""

from __future__ import annotations

import torch

from ..common import checks
from ..common.device import has_kernel
from ..common.torch_library import register
from .fused_cuda import FusedLinear, launch_fused
from .linear import check_weight, multiply
from .norms import check_norm, normalize_and_quantize, sum_like
from .packed_weight import PackedWeight
from .quantize import quantize_tokens


def dynamic_w8a8_linear(
    x: torch.Tensor,
    w: torch.Tensor | PackedWeight,
    w_scale: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    n_active: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    batch_invariant: bool = False,
    out: torch.Tensor | None = None,
    stream: checks.Stream = None,
) -> torch.Tensor:
    """Do `quantize_per_token`, then `w8a8_linear` with its results; the bits are the same.

    On CUDA one token of 16 bits, with up to 8192 features (a multiple of 16) and a packed w, is one
    launch wherever `w8a8_linear` would stream the weights (INT8 ones: `gemm_small_m`), if x is
    aligned to 16 bytes and bias has `out_dtype`. w, w_scale and bias are constants, as
    `w8a8_linear` has it.

    Args:
        x: [M, K] bf16, fp16 or fp32.
        w: [N, K] int8 or float8_e4m3fn, plain or packed.
        w_scale: fp32, [N] per output channel or a scalar.
        bias: [N] of `out_dtype`, or fp32.
        n_active: as of `w8a8_linear`; rows after the real ones are not quantised, either.
        out_dtype: bf16, fp16 or fp32.
        batch_invariant: as of `w8a8_linear`.
        out: [M, N] of `out_dtype`, written and returned; allocated when None.
        stream: see `ostinato.ops`.

    Raises:
        TypeError, ValueError: naming the argument, before anything is written.
        MissingKernelError: when the kernel is not compiled, and must or can not be now.
    """
    checks.tensor("x", x, checks.FLOAT_DTYPES, ("M", "K"))
    checks.not_empty("x", x, "K")
    shape = (x.size(0), check_weight(w, x.shape, w_scale, bias, out_dtype, x.device))
    checks.active(n_active, x.device)
    checks.flag("batch_invariant", batch_invariant)
    if out is not None:
        checks.output("out", out, (out_dtype,), shape, x.device)
    with checks.launch_stream(stream, x.device):
        if out is None:
            out = torch.empty(shape, dtype=out_dtype, device=x.device)
        data = w.data if isinstance(w, PackedWeight) else w
        _dynamic_w8a8_linear_op(x, data, w_scale, bias, n_active, batch_invariant, out)
    return out


def rms_norm_w8a8_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    w: torch.Tensor | PackedWeight,
    w_scale: torch.Tensor,
    *,
    residual: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    n_active: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    batch_invariant: bool = False,
    stream: checks.Stream = None,
) -> tuple[torch.Tensor, ...]:
    """Do `rms_norm_quantize` per token, then `w8a8_linear` with its results; the bits are the same.

    `weight` [K] and `eps` are the norm's, `residual` [M, K] is added to x before it; all else is as
    for `dynamic_w8a8_linear`. The norm's weight is a constant, too.

    Returns:
        (y [M, N] of `out_dtype`,), then the sum x + residual of x's dtype if `residual` was given.

    Raises:
        TypeError, ValueError: naming the argument, before anything is written.
        MissingKernelError: when the kernel is not compiled, and must or can not be now.
    """
    check_norm(x, weight, eps, residual)
    shape = (x.size(0), check_weight(w, x.shape, w_scale, bias, out_dtype, x.device))
    checks.active(n_active, x.device)
    checks.flag("batch_invariant", batch_invariant)
    with checks.launch_stream(stream, x.device):
        out = torch.empty(shape, dtype=out_dtype, device=x.device)
        total = sum_like(x, residual)
        data = w.data if isinstance(w, PackedWeight) else w
        _rms_norm_w8a8_linear_op(
            x, weight, eps, residual, data, w_scale, bias, n_active, batch_invariant, out, total
        )
    return (out,) if total is None else (out, total)


def _dynamic_w8a8_linear(
    x: torch.Tensor,
    w: torch.Tensor,
    w_scale: torch.Tensor,
    bias: torch.Tensor | None,
    n_active: torch.Tensor | None,
    batch_invariant: bool,
    out: torch.Tensor,
) -> None:
    if has_kernel(FusedLinear, x) and launch_fused(
        x, None, 0.0, None, w, w_scale, bias, batch_invariant, out, None
    ):
        return
    codes, scale = codes_of(x, w)
    quantize_tokens(x, codes, scale, n_active)
    how = (True, batch_invariant, False)
    multiply(codes, w, scale, w_scale, bias, None, None, n_active, *how, out)


def _rms_norm_w8a8_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None,
    w: torch.Tensor,
    w_scale: torch.Tensor,
    bias: torch.Tensor | None,
    n_active: torch.Tensor | None,
    batch_invariant: bool,
    out: torch.Tensor,
    residual_out: torch.Tensor | None,
) -> None:
    if has_kernel(FusedLinear, x) and launch_fused(
        x, weight, eps, residual, w, w_scale, bias, batch_invariant, out, residual_out
    ):
        return
    codes, scale = codes_of(x, w)
    outputs = (codes, scale, residual_out)
    normalize_and_quantize(
        "rms_norm", x, weight, None, eps, residual, None, None, False, *outputs, n_active
    )
    how = (True, batch_invariant, False)
    multiply(codes, w, scale, w_scale, bias, None, None, n_active, *how, out)


def codes_of(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return memory for x as 8-bit rows and their scales."""
    return (
        torch.empty(x.shape, dtype=w.dtype, device=x.device),
        torch.empty(x.size(0), dtype=torch.float32, device=x.device),
    )


_dynamic_w8a8_linear_op = register(
    "dynamic_w8a8_linear(Tensor x, Tensor w, Tensor w_scale, Tensor? bias, Tensor? n_active, "
    "bool batch_invariant, Tensor(a!) out) -> ()",
    _dynamic_w8a8_linear,
)
_rms_norm_w8a8_linear_op = register(
    "rms_norm_w8a8_linear(Tensor x, Tensor weight, float eps, Tensor? residual, Tensor w, "
    "Tensor w_scale, Tensor? bias, Tensor? n_active, bool batch_invariant, Tensor(a!) out, "
    "Tensor(b!)? residual_out) -> ()",
    _rms_norm_w8a8_linear,
)
