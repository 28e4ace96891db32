"""SiLU-gating, alone or fused with the quantisation that follows it."""

from __future__ import annotations

from functools import partial

import torch

from ..common import checks
from ..common.device import has_kernel
from ..common.torch_library import register
from .quantize import check_static, check_static_values, quantize_into
from .quantize_cuda import Quantize, quantize_rows


def silu_mul(
    x: torch.Tensor, *, out: torch.Tensor | None = None, stream: checks.Stream = None
) -> torch.Tensor:
    """Gate: silu(gate) · up, where x = [gate | up] and silu(g) = g / (1 + exp(-g)).

    Source: the SwiGLU of Shazeer, "GLU Variants Improve Transformer", 2020. On a GPU, from sm_80
    on, this is one launch.

    Args:
        x: [M, 2·I] bf16, fp16 or fp32.
        out: [M, I] of x's dtype, written and returned; allocated when None.
        stream: see `ostinato.ops`.

    Raises:
        TypeError, ValueError: naming the argument, before anything is written.
    """
    shape = check_gated(x)
    if out is not None:
        checks.output("out", out, (x.dtype,), shape, x.device)
    with checks.launch_stream(stream, x.device):
        if out is None:
            out = torch.empty(shape, dtype=x.dtype, device=x.device)
        _silu_mul_op(x, out)
    return out


def silu_mul_quantize(
    x: torch.Tensor,
    dtype: torch.dtype,
    *,
    scale: torch.Tensor | None = None,
    zero_point: torch.Tensor | None = None,
    check_scales: bool = False,
    n_active: torch.Tensor | None = None,
    discard_x: bool = False,
    stream: checks.Stream = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Do `silu_mul`, then quantise its fp32 result without rounding it in between.

    Quantisation is that of `quantize_per_token`, or with `scale` that of `quantize_per_tensor`,
    whose `dtype`, `scale`, `zero_point`, `check_scales` and `n_active` these are; all else is as
    for `silu_mul`.

    With `discard_x` what x holds afterwards is undefined: on CUDA the L2 cache then forgets what
    was read instead of writing it to memory, where rows of x begin on multiples of 128 bytes and
    their halves are made of as many; on a CPU x becomes NaN.

    Returns:
        (values [M, I] of `dtype`, scale [M] fp32); with `scale`, the second is the `scale_out` of
        `quantize_per_tensor`.

    Raises:
        TypeError, ValueError: naming the argument, before anything is written.
    """
    checks.option("dtype", dtype, checks.QUANTIZED_DTYPES)
    shape = check_gated(x, discard_x=discard_x)
    check_static(scale, zero_point, dtype, x.device)
    checks.flag("check_scales", check_scales)
    checks.active(n_active, x.device)
    quantize = _silu_mul_quantize_discarding_op if discard_x else _silu_mul_quantize_op
    with checks.launch_stream(stream, x.device):
        out = torch.empty(shape, dtype=dtype, device=x.device)
        scale_out = torch.empty(x.size(0), dtype=torch.float32, device=x.device)
        quantize(x, scale, zero_point, check_scales, out, scale_out, n_active)
    return out, scale_out


def check_gated(x: torch.Tensor, *, discard_x: bool = False) -> tuple[int, int]:
    """Check x [M, 2·I], to be gated and perhaps discarded; return (M, I)."""
    checks.tensor("x", x, checks.FLOAT_DTYPES, ("M", "2*I"))
    checks.not_empty("x", x, "2*I")
    checks.int32_sizes("x", x.shape, "M", "2*I")
    if x.size(1) % 2:
        raise ValueError(f"x: got {x.size(1)} columns, expected an even number, [gate | up]")
    checks.flag("discard_x", discard_x)
    if discard_x and x.size(0) > 1 and x.stride(0) < x.size(1):
        # A row that has been read would take the next one's elements along.
        raise ValueError(
            f"x: got strides {list(x.stride())} for shape {list(x.shape)}, "
            "expected rows that share no memory, to be discarded"
        )
    return x.size(0), x.size(1) // 2


def gated(x: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) · up of x [M, 2·I], in fp32 by torch's operators."""
    gate, up = x.float().chunk(2, dim=1)
    # Not torch's silu: on the CPU its vectorised and its scalar code round differently, so that a
    # row's bits would depend on where it lies in the batch. exp has no such seam. In place, because
    # on the CPU fresh memory for the rows of a prompt costs more than the arithmetic.
    denominator = torch.neg(gate).exp_().add_(1.0)
    return torch.div(gate, denominator, out=denominator).mul_(up)


def _silu_mul(x: torch.Tensor, out: torch.Tensor) -> None:
    if has_kernel(Quantize, x):
        quantize_rows("silu_mul", x, None, None, out, None)
    else:
        out.copy_(gated(x))


def _silu_mul_quantize(
    x: torch.Tensor,
    scale: torch.Tensor | None,
    zero_point: torch.Tensor | None,
    check_scales: bool,
    out: torch.Tensor,
    scale_out: torch.Tensor | None,
    n_active: torch.Tensor | None = None,
    *,
    discard_x: bool = False,
) -> None:
    check_static_values(scale, zero_point, check_scales)
    if has_kernel(Quantize, x):
        quantize_rows(
            "silu_mul",
            x,
            scale,
            zero_point,
            out,
            scale_out,
            n_active=n_active,
            discard_x=discard_x,
        )
    else:
        quantize_into(gated(x), scale, zero_point, out, scale_out)
        if discard_x:
            x.fill_(torch.nan)


_silu_mul_op = register("silu_mul(Tensor x, Tensor(a!) out) -> ()", _silu_mul)
_silu_mul_quantize_op = register(
    "silu_mul_quantize(Tensor x, Tensor? scale, Tensor? zero_point, bool check_scales, "
    "Tensor(a!) out, Tensor(b!)? scale_out, Tensor? n_active=None) -> ()",
    _silu_mul_quantize,
)
_silu_mul_quantize_discarding_op = register(
    "silu_mul_quantize_discarding(Tensor(a!) x, Tensor? scale, Tensor? zero_point, "
    "bool check_scales, Tensor(b!) out, Tensor(c!)? scale_out, Tensor? n_active=None) -> ()",
    partial(_silu_mul_quantize, discard_x=True),
)
