"""Activation functions, gated or not, alone or fused with the quantisation that follows them."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch

from ..common import checks
from ..common.device import has_kernel
from ..common.torch_library import register
from .quantize import check_static, check_static_values, quantize_into
from .quantize_cuda import ACTIVATIONS, GATED, Quantize, quantize_rows

_TANH_FACTOR = 2.0 * math.sqrt(2.0 / math.pi)
_TANH_CUBE = 0.044715


def activation(
    x: torch.Tensor, kind: str, *, out: torch.Tensor | None = None, stream: checks.Stream = None
) -> torch.Tensor:
    """Apply an activation function: f(x), or f(gate) · up for x = [gate | up].

    The functions: silu(x) = x / (1 + exp(-x)); gelu(x) = x · Φ(x) with the normal distribution's Φ
    (Hendrycks and Gimpel, "Gaussian Error Linear Units", 2016), and gelu_tanh, its approximation
    x / (1 + exp(-2u)) with u = sqrt(2/π)·(x + 0.044715·x³), which is x·(1 + tanh u)/2;
    relu(x) = max(x, 0); relu2(x) = max(x, 0)² (So et al., "Primer", 2021). Gates are those of
    Shazeer, "GLU Variants Improve Transformer", 2020. On a GPU, from sm_80 on, this is one launch.

    Args:
        x: [M, K] bf16, fp16 or fp32; [M, 2·K] for a gated kind.
        kind: silu, gelu, gelu_tanh, relu or relu2; silu_mul, gelu_mul and so on are gated.
        out: [M, K] of x's dtype, written and returned; allocated when None.
        stream: see `ostinato.ops`.

    Raises:
        TypeError, ValueError: naming the argument, before anything is written.
    """
    shape = check_activation(x, kind)
    if out is not None:
        checks.output("out", out, (x.dtype,), shape, x.device)
    with checks.launch_stream(stream, x.device):
        if out is None:
            out = torch.empty(shape, dtype=x.dtype, device=x.device)
        _activation_op(x, kind, out)
    return out


def activation_quantize(
    x: torch.Tensor,
    kind: str,
    dtype: torch.dtype,
    *,
    scale: torch.Tensor | None = None,
    zero_point: torch.Tensor | None = None,
    check_scales: bool = False,
    n_active: torch.Tensor | None = None,
    discard_x: bool = False,
    stream: checks.Stream = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Do `activation`, then quantise its fp32 result without rounding it in between.

    Quantisation is that of `quantize_per_token`, or with `scale` that of `quantize_per_tensor`,
    whose `dtype`, `scale`, `zero_point`, `check_scales` and `n_active` these are; all else is as
    for `activation`.

    With `discard_x` what x holds afterwards is undefined: on CUDA the L2 cache then forgets what
    was read instead of writing it to memory, where rows of x begin on multiples of 128 bytes and
    they, or their halves, are made of as many; on a CPU x becomes NaN.

    Returns:
        (values [M, K] of `dtype`, scale [M] fp32); with `scale`, the second is the `scale_out` of
        `quantize_per_tensor`.

    Raises:
        TypeError, ValueError: naming the argument, before anything is written.
    """
    checks.option("dtype", dtype, checks.QUANTIZED_DTYPES)
    shape = check_activation(x, kind, discard_x=discard_x)
    check_static(scale, zero_point, dtype, x.device)
    checks.flag("check_scales", check_scales)
    checks.active(n_active, x.device)
    quantize = _activation_quantize_discarding_op if discard_x else _activation_quantize_op
    with checks.launch_stream(stream, x.device):
        out = torch.empty(shape, dtype=dtype, device=x.device)
        scale_out = torch.empty(x.size(0), dtype=torch.float32, device=x.device)
        quantize(x, kind, scale, zero_point, check_scales, out, scale_out, n_active)
    return out, scale_out


def silu_mul(
    x: torch.Tensor, *, out: torch.Tensor | None = None, stream: checks.Stream = None
) -> torch.Tensor:
    """Gate: silu(gate) · up, where x = [gate | up]: `activation` of the kind silu_mul."""
    return activation(x, "silu_mul", out=out, stream=stream)


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
    """Do `silu_mul`, then quantise its fp32 result: `activation_quantize` of the kind silu_mul."""
    return activation_quantize(
        x,
        "silu_mul",
        dtype,
        scale=scale,
        zero_point=zero_point,
        check_scales=check_scales,
        n_active=n_active,
        discard_x=discard_x,
        stream=stream,
    )


def check_activation(x: torch.Tensor, kind: str, *, discard_x: bool = False) -> tuple[int, int]:
    """Check what `activation` takes, perhaps to be discarded; return the result's shape."""
    if kind not in ACTIVATIONS:
        raise ValueError(f"kind: got {kind!r}, expected one of {', '.join(ACTIVATIONS)}")
    columns = "2*K" if kind in GATED else "K"
    checks.tensor("x", x, checks.FLOAT_DTYPES, ("M", columns))
    checks.not_empty("x", x, columns)
    checks.int32_sizes("x", x.shape, "M", columns)
    if kind in GATED and x.size(1) % 2:
        raise ValueError(f"x: got {x.size(1)} columns, expected an even number, [gate | up]")
    checks.flag("discard_x", discard_x)
    if discard_x and x.size(0) > 1 and x.stride(0) < x.size(1):
        # A row that has been read would take the next one's elements along.
        raise ValueError(
            f"x: got strides {list(x.stride())} for shape {list(x.shape)}, "
            "expected rows that share no memory, to be discarded"
        )
    return x.size(0), x.size(1) // 2 if kind in GATED else x.size(1)


# Not torch's own silu, gelu and sigmoid: on the CPU their vectorised and their scalar code round
# differently, so that a row's bits would depend on where it lies in the batch. exp and erf have no
# such seam. In place, because on the CPU fresh memory for the rows of a prompt costs more than the
# arithmetic. Each function gets fp32 memory of its own.


def _over_one_plus_exp(x: torch.Tensor, exponent: torch.Tensor) -> torch.Tensor:
    """Return x / (1 + exp(-exponent)), written over the exponent."""
    denominator = exponent.neg_().exp_().add_(1.0)
    return torch.div(x, denominator, out=denominator)


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    factor = x.square().mul_(_TANH_FACTOR * _TANH_CUBE).add_(_TANH_FACTOR)
    return _over_one_plus_exp(x, factor.mul_(x))


def _gelu(x: torch.Tensor) -> torch.Tensor:
    doubled = (x * math.sqrt(0.5)).erf_().add_(1.0)
    return doubled.mul_(x * 0.5)


_FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": lambda x: _over_one_plus_exp(x, x.clone()),
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "relu": lambda x: x.clamp_min(0.0),
    "relu2": lambda x: x.clamp_min(0.0).square_(),
}


def activated(x: torch.Tensor, kind: str) -> torch.Tensor:
    """Return what `activation` makes of x, in fp32 by torch's operators."""
    if kind not in GATED:
        return _FUNCTIONS[kind](x.float())
    gate, up = x.float().chunk(2, dim=1)
    return _FUNCTIONS[kind.removesuffix("_mul")](gate).mul_(up)


def _activation(x: torch.Tensor, kind: str, out: torch.Tensor) -> None:
    if has_kernel(Quantize, x):
        quantize_rows(kind, x, None, None, out, None)
    else:
        out.copy_(activated(x, kind))


def activation_quantize_into(
    x: torch.Tensor,
    kind: str,
    scale: torch.Tensor | None,
    zero_point: torch.Tensor | None,
    check_scales: bool,
    out: torch.Tensor,
    scale_out: torch.Tensor | None,
    n_active: torch.Tensor | None = None,
    *,
    discard_x: bool = False,
) -> None:
    """Do `activation_quantize` with checked arguments."""
    check_static_values(scale, zero_point, check_scales)
    if has_kernel(Quantize, x):
        quantize_rows(
            kind,
            x,
            scale,
            zero_point,
            out,
            scale_out,
            n_active=n_active,
            discard_x=discard_x,
        )
    else:
        quantize_into(activated(x, kind), scale, zero_point, out, scale_out)
        if discard_x:
            x.fill_(torch.nan)


_activation_op = register("activation(Tensor x, str kind, Tensor(a!) out) -> ()", _activation)
_activation_quantize_op = register(
    "activation_quantize(Tensor x, str kind, Tensor? scale, Tensor? zero_point, "
    "bool check_scales, Tensor(a!) out, Tensor(b!)? scale_out, Tensor? n_active=None) -> ()",
    activation_quantize_into,
)
_activation_quantize_discarding_op = register(
    "activation_quantize_discarding(Tensor(a!) x, str kind, Tensor? scale, Tensor? zero_point, "
    "bool check_scales, Tensor(b!) out, Tensor(c!)? scale_out, Tensor? n_active=None) -> ()",
    partial(activation_quantize_into, discard_x=True),
)
