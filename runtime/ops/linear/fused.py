"""W8A8 linear layers together with what makes their activations: quantisation, norms, gates."""

from __future__ import annotations

import torch

from ..common import checks
from ..common.device import has_kernel
from ..common.torch_library import register
from .activation import activation_quantize_into
from .fused_cuda import FusedLinear, Weights, launch_fused, launch_gated
from .linear import check_weight, multiply
from .norms import check_norm, normalize_and_quantize, sum_like
from .packed_weight import PackedWeight, data_of
from .quantize import quantize_tokens
from .quantize_cuda import GATED


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
        data = data_of(w)
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
        data = data_of(w)
        _rms_norm_w8a8_linear_op(
            x, weight, eps, residual, data, w_scale, bias, n_active, batch_invariant, out, total
        )
    return (out,) if total is None else (out, total)


def rms_norm_w8a8_mlp(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    gate_up_w: torch.Tensor | PackedWeight,
    gate_up_w_scale: torch.Tensor,
    down_w: torch.Tensor | PackedWeight,
    down_w_scale: torch.Tensor,
    kind: str,
    *,
    residual: torch.Tensor | None = None,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    n_active: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    batch_invariant: bool = False,
    stream: checks.Stream = None,
) -> tuple[torch.Tensor, ...]:
    """Do `rms_norm_w8a8_linear`, `activation_quantize` and `w8a8_linear`; the bits are the same.

    On CUDA one token for which both layers would be one launch each as `dynamic_w8a8_linear` has it
    takes two launches in all, if `out_dtype` is x's dtype and I a multiple of 16: the first stores
    f(gate) · up in fp32 beside its largest magnitudes, and the second quantises what it multiplies.
    I, the width of the MLP, may be above 8192.

    Args:
        x: [M, K] bf16, fp16 or fp32.
        weight: of the norm, as of `rms_norm_w8a8_linear`, whose `eps` and `residual` these are.
        eps: likewise.
        gate_up_w: [2·I, K] int8 or float8_e4m3fn, plain or packed.
        gate_up_w_scale: fp32, [2·I] per output channel or a scalar.
        down_w: [N, I] of the dtype of gate_up_w, plain or packed.
        down_w_scale: fp32, [N] or a scalar.
        kind: silu_mul, gelu_mul, gelu_tanh_mul, relu_mul or relu2_mul, as of `activation`.
        residual: [M, K] of x's dtype, added to x before the norm.
        gate_up_bias: [2·I] of `out_dtype`, or fp32.
        down_bias: [N] likewise.
        n_active: as of `w8a8_linear`; rows after the real ones are not quantised, either.
        out_dtype: bf16, fp16 or fp32, of gates and ups as well.
        batch_invariant: as of `w8a8_linear`.
        stream: see `ostinato.ops`.

    Returns:
        (y [M, N] of `out_dtype`,), then the sum x + residual of x's dtype if `residual` was given.

    Raises:
        TypeError, ValueError: naming the argument, before anything is written.
        MissingKernelError: when the kernel is not compiled, and must or can not be now.
    """
    check_norm(x, weight, eps, residual)
    if kind not in GATED:
        raise ValueError(f"kind: got {kind!r}, expected one of {', '.join(GATED)}")
    rows, device = x.size(0), x.device
    of_gates = (gate_up_w_scale, gate_up_bias, out_dtype, device)
    both = check_weight(gate_up_w, x.shape, *of_gates, prefix="gate_up_")
    if both % 2:
        raise ValueError(f"gate_up_w: got {both} rows, expected an even number, [gate | up]")
    width, of_down = both // 2, (down_w_scale, down_bias, out_dtype, device)
    made = torch.Size((rows, width))
    columns = check_weight(down_w, made, *of_down, (gate_up_w.dtype,), prefix="down_")
    checks.active(n_active, device)
    checks.flag("batch_invariant", batch_invariant)
    with checks.launch_stream(stream, device):
        out = torch.empty((rows, columns), dtype=out_dtype, device=device)
        total = sum_like(x, residual)
        first, second = data_of(gate_up_w), data_of(down_w)
        _rms_norm_w8a8_mlp_op(
            *(x, weight, eps, residual, first, gate_up_w_scale, gate_up_bias),
            *(second, down_w_scale, down_bias, width, kind, n_active, batch_invariant),
            *(out, total),
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
        x, None, 0.0, None, Weights(w, w_scale, bias), batch_invariant, out, None
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
    weights = Weights(w, w_scale, bias)
    if has_kernel(FusedLinear, x) and launch_fused(
        x, weight, eps, residual, weights, batch_invariant, out, residual_out
    ):
        return
    codes, scale = codes_of(x, w)
    outputs = (codes, scale, residual_out)
    normalize_and_quantize(
        "rms_norm", x, weight, None, eps, residual, None, None, False, *outputs, n_active
    )
    how = (True, batch_invariant, False)
    multiply(codes, w, scale, w_scale, bias, None, None, n_active, *how, out)


def _rms_norm_w8a8_mlp(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None,
    gate_up_w: torch.Tensor,
    gate_up_w_scale: torch.Tensor,
    gate_up_bias: torch.Tensor | None,
    down_w: torch.Tensor,
    down_w_scale: torch.Tensor,
    down_bias: torch.Tensor | None,
    width: int,
    kind: str,
    n_active: torch.Tensor | None,
    batch_invariant: bool,
    out: torch.Tensor,
    residual_out: torch.Tensor | None,
) -> None:
    gate_up = Weights(gate_up_w, gate_up_w_scale, gate_up_bias)
    down = Weights(down_w, down_w_scale, down_bias)
    if has_kernel(FusedLinear, x) and launch_gated(
        *(x, weight, eps, residual, gate_up, down, width, kind, batch_invariant),
        *(out, residual_out),
    ):
        return
    made = torch.empty((x.size(0), 2 * width), dtype=out.dtype, device=x.device)
    _rms_norm_w8a8_linear(
        *(x, weight, eps, residual, *gate_up, n_active, batch_invariant, made, residual_out)
    )
    codes = torch.empty((x.size(0), width), dtype=down_w.dtype, device=x.device)
    scale = torch.empty(x.size(0), dtype=torch.float32, device=x.device)
    activation_quantize_into(made, kind, None, None, False, codes, scale, n_active, discard_x=True)
    how = (True, batch_invariant, False)
    multiply(codes, down_w, scale, down_w_scale, down_bias, None, None, n_active, *how, out)


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
_rms_norm_w8a8_mlp_op = register(
    "rms_norm_w8a8_mlp(Tensor x, Tensor weight, float eps, Tensor? residual, Tensor gate_up_w, "
    "Tensor gate_up_w_scale, Tensor? gate_up_bias, Tensor down_w, Tensor down_w_scale, "
    "Tensor? down_bias, int width, str kind, Tensor? n_active, bool batch_invariant, "
    "Tensor(a!) out, Tensor(b!)? residual_out) -> ()",
    _rms_norm_w8a8_mlp,
)
