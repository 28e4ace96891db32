"""Quantisation to FP8 (e4m3) by groups of 128, alone or after a norm or an activation function."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch.nn import functional

from ..common import checks
from ..common.device import has_kernel
from ..common.sizes import ceil_div
from ..common.torch_library import register
from .activation import activated, check_activation
from .block_scales import empty_scales
from .norms import as_rms_norm, check_layer_norm, check_norm, normalized, sum_like
from .quantize import dynamic_scale, encode
from .quantize_cuda import GROUP, Quantize, quantize_rows

_E4M3 = torch.float8_e4m3fn


def quantize_per_group(
    x: torch.Tensor,
    *,
    power_of_two: bool = False,
    n_active: torch.Tensor | None = None,
    stream: checks.Stream = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise each 128 elements of a row of x with a scale of their own, to e4m3.

    scale = amax(|group|) / 448 (a group of zeros gets the smallest normal fp32 number); values =
    group / scale, rounded to nearest, ties to even. The last group of a row may be shorter.

    Args:
        x: [M, K] bf16, fp16 or fp32.
        power_of_two: round scales up to powers of two (the `ue8m0` of DeepSeek's files).
        n_active: as of `quantize_per_token`.
        stream: see `ostinato.ops`.

    Returns:
        (values [M, K] e4m3, scale [ceil(K / 128), M] fp32) with x ≈ values · scale. Rows of the
        scale begin at multiples of 16 bytes, as `fp8_block_linear` reads them.

    Raises:
        TypeError, ValueError: naming the argument, before anything is written.
    """
    checks.tensor("x", x, checks.FLOAT_DTYPES, ("M", "K"))
    checks.not_empty("x", x, "K")
    checks.int32_sizes("x", x.shape, "M", "K")
    checks.flag("power_of_two", power_of_two)
    checks.active(n_active, x.device)
    with checks.launch_stream(stream, x.device):
        out, scale_out = _outputs(x.size(0), x.size(1), x.device)
        _quantize_per_group_op(x, power_of_two, out, scale_out, n_active)
    return out, scale_out


def rms_norm_quantize_per_group(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    residual: torch.Tensor | None = None,
    power_of_two: bool = False,
    n_active: torch.Tensor | None = None,
    stream: checks.Stream = None,
) -> tuple[torch.Tensor, ...]:
    """Do `rms_norm`, then `quantize_per_group` with its fp32 result, not rounded in between.

    All else is as for `rms_norm_quantize`.

    Returns:
        (values [M, K] e4m3, scale [ceil(K / 128), M] fp32), then the sum x + residual if `residual`
        was given.

    Raises:
        TypeError, ValueError: naming the argument, before anything is written.
    """
    check_norm(x, weight, eps, residual)
    given = (weight, eps)
    return _normalize_and_quantize(
        _rms_norm_quantize_per_group_op, x, given, residual, power_of_two, n_active, stream
    )


def layer_norm_quantize_per_group(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    power_of_two: bool = False,
    n_active: torch.Tensor | None = None,
    stream: checks.Stream = None,
) -> tuple[torch.Tensor, ...]:
    """Do `layer_norm` of x [M, K], then `quantize_per_group` with its fp32 result.

    The result is not rounded in between. All else is as for `layer_norm_quantize`.

    Returns:
        (values [M, K] e4m3, scale [ceil(K / 128), M] fp32), then the sum x + residual if `residual`
        was given.

    Raises:
        TypeError, ValueError: naming the argument, before anything is written.
    """
    check_layer_norm(x, weight, eps, bias, residual)
    given = (weight, bias, eps)
    return _normalize_and_quantize(
        _layer_norm_quantize_per_group_op, x, given, residual, power_of_two, n_active, stream
    )


def _normalize_and_quantize(
    op: Callable[..., None],
    x: torch.Tensor,
    given: tuple[object, ...],
    residual: torch.Tensor | None,
    power_of_two: bool,
    n_active: torch.Tensor | None,
    stream: checks.Stream,
) -> tuple[torch.Tensor, ...]:
    """Check the rest, and call the op of a norm; return what the norm returns."""
    checks.flag("power_of_two", power_of_two)
    checks.active(n_active, x.device)
    with checks.launch_stream(stream, x.device):
        out, scale_out = _outputs(x.size(0), x.size(1), x.device)
        total = sum_like(x, residual)
        op(x, *given, residual, power_of_two, out, scale_out, total, n_active)
    return (out, scale_out) if total is None else (out, scale_out, total)


def activation_quantize_per_group(
    x: torch.Tensor,
    kind: str,
    *,
    power_of_two: bool = False,
    n_active: torch.Tensor | None = None,
    discard_x: bool = False,
    stream: checks.Stream = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Do `activation`, then `quantize_per_group` with its fp32 result.

    The result is not rounded in between. All else is as for `activation_quantize`.

    Returns:
        (values [M, K] e4m3, scale [ceil(K / 128), M] fp32).

    Raises:
        TypeError, ValueError: naming the argument, before anything is written.
    """
    rows, columns = check_activation(x, kind, discard_x=discard_x)
    checks.flag("power_of_two", power_of_two)
    checks.active(n_active, x.device)
    quantize = _activation_quantize_per_group_op
    if discard_x:
        quantize = _activation_quantize_per_group_discarding_op
    with checks.launch_stream(stream, x.device):
        out, scale_out = _outputs(rows, columns, x.device)
        quantize(x, kind, power_of_two, out, scale_out, n_active)
    return out, scale_out


def silu_mul_quantize_per_group(
    x: torch.Tensor,
    *,
    power_of_two: bool = False,
    n_active: torch.Tensor | None = None,
    discard_x: bool = False,
    stream: checks.Stream = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Do `activation_quantize_per_group` of the kind silu_mul."""
    return activation_quantize_per_group(
        x,
        "silu_mul",
        power_of_two=power_of_two,
        n_active=n_active,
        discard_x=discard_x,
        stream=stream,
    )


def power_of_two_scale(scale: torch.Tensor) -> torch.Tensor:
    """Return the least powers of two that are not smaller than positive fp32 numbers."""
    mantissa, exponent = torch.frexp(scale)
    rounded = torch.ldexp(torch.ones_like(scale), exponent - (mantissa == 0.5).int())
    return torch.where(scale.isfinite(), rounded, scale)


def _outputs(rows: int, k: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    codes = torch.empty((rows, k), dtype=_E4M3, device=device)
    return codes, empty_scales(ceil_div(k, GROUP), rows, device)


def _quantize_into(
    x: torch.Tensor, power_of_two: bool, out: torch.Tensor, scale_out: torch.Tensor
) -> None:
    """Quantise x [M, K] fp32 by torch's operators."""
    rows, k = x.shape
    groups = functional.pad(x, (0, -k % GROUP)).view(rows, scale_out.size(0), GROUP)
    scale = dynamic_scale(groups, _E4M3)
    if power_of_two:
        scale = power_of_two_scale(scale)
    codes = encode(groups, scale.unsqueeze(2), _E4M3)
    out.copy_(codes.flatten(1)[:, :k])
    scale_out.copy_(scale.t())


def _quantize_per_group(
    x: torch.Tensor,
    power_of_two: bool,
    out: torch.Tensor,
    scale_out: torch.Tensor,
    n_active: torch.Tensor | None = None,
) -> None:
    if has_kernel(Quantize, x):
        quantize_rows(
            "per_token",
            x,
            None,
            None,
            out,
            scale_out,
            n_active=n_active,
            group=GROUP,
            power_of_two=power_of_two,
        )
    else:
        _quantize_into(x.float(), power_of_two, out, scale_out)


def norm_quantize_per_group(
    kind: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    residual: torch.Tensor | None,
    power_of_two: bool,
    out: torch.Tensor,
    scale_out: torch.Tensor,
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
            residual=residual,
            residual_out=residual_out,
            norm_weight=weight,
            norm_bias=bias,
            eps=eps,
            n_active=n_active,
            group=GROUP,
            power_of_two=power_of_two,
        )
    else:
        rows = normalized(kind, x, weight, bias, eps, residual, residual_out)
        _quantize_into(rows, power_of_two, out, scale_out)


def _activation_quantize_per_group(
    x: torch.Tensor,
    kind: str,
    power_of_two: bool,
    out: torch.Tensor,
    scale_out: torch.Tensor,
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
            n_active=n_active,
            discard_x=discard_x,
            group=GROUP,
            power_of_two=power_of_two,
        )
    else:
        _quantize_into(activated(x, kind), power_of_two, out, scale_out)
        if discard_x:
            x.fill_(torch.nan)


_quantize_per_group_op = register(
    "quantize_per_group(Tensor x, bool power_of_two, Tensor(a!) out, Tensor(b!) scale_out, "
    "Tensor? n_active=None) -> ()",
    _quantize_per_group,
)
_rms_norm_quantize_per_group_op = register(
    "rms_norm_quantize_per_group(Tensor x, Tensor weight, float eps, Tensor? residual, "
    "bool power_of_two, Tensor(a!) out, Tensor(b!) scale_out, Tensor(c!)? residual_out, "
    "Tensor? n_active=None) -> ()",
    as_rms_norm(norm_quantize_per_group),
)
_layer_norm_quantize_per_group_op = register(
    "layer_norm_quantize_per_group(Tensor x, Tensor weight, Tensor? bias, float eps, "
    "Tensor? residual, bool power_of_two, Tensor(a!) out, Tensor(b!) scale_out, "
    "Tensor(c!)? residual_out, Tensor? n_active=None) -> ()",
    partial(norm_quantize_per_group, "layer_norm"),
)
_activation_quantize_per_group_op = register(
    "activation_quantize_per_group(Tensor x, str kind, bool power_of_two, Tensor(a!) out, "
    "Tensor(b!) scale_out, Tensor? n_active=None) -> ()",
    _activation_quantize_per_group,
)
_activation_quantize_per_group_discarding_op = register(
    "activation_quantize_per_group_discarding(Tensor(a!) x, str kind, bool power_of_two, "
    "Tensor(b!) out, Tensor(c!) scale_out, Tensor? n_active=None) -> ()",
    partial(_activation_quantize_per_group, discard_x=True),
)
