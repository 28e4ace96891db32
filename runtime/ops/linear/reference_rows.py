"""The readable twins of norms, activations and quantisation; see `ostinato.ops.reference`."""

from __future__ import annotations

import math

import torch

_GROUP = 128
_GRID_MAX = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


def dynamic_scale(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the scale of each row of x [..., K]: amax / grid maximum, and always positive."""
    amax = x.abs().amax(-1)
    scale = amax / torch.full_like(amax, _GRID_MAX[dtype])
    return scale.clamp(min=torch.finfo(torch.float32).tiny)


def on_grid(x: torch.Tensor, zero_point: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Round x to the numbers of `dtype`, to nearest, ties to even, saturating."""
    if dtype is torch.float8_e4m3fn:
        return x.clamp(-448, 448).to(dtype)
    codes = x.round() if zero_point is None else x.round() + zero_point
    return codes.clamp(-128, 127).to(dtype)


def quantize_per_token(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise each row of x with a scale of its own."""
    x = x.float()
    scale = dynamic_scale(x, dtype)
    return on_grid(x / scale.unsqueeze(1), None, dtype), scale


def quantize_per_group(
    x: torch.Tensor, *, power_of_two: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise each 128 elements of a row to e4m3; return (values, scale [groups, rows])."""
    values, scales = [], []
    for group in x.float().split(_GROUP, dim=1):
        scale = dynamic_scale(group, torch.float8_e4m3fn)
        if power_of_two:
            scale = scale.double().log2().ceil().exp2().float()
        values.append(on_grid(group / scale.unsqueeze(1), None, torch.float8_e4m3fn))
        scales.append(scale)
    return torch.cat([v.view(torch.int8) for v in values], 1).view(values[0].dtype), torch.stack(
        scales
    )


def quantize_asymmetric(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Map each row's range, 0 included, to -128..127; return (values, scale, zero point)."""
    x = x.float()
    low, high = x.amin(1, keepdim=True).clamp(max=0), x.amax(1, keepdim=True).clamp(min=0)
    scale = (high - low) / torch.full_like(high, 255)
    scale = scale.clamp(min=torch.finfo(torch.float32).tiny)
    zero = (-128 - low / scale).round().nan_to_num(-128).clamp(-128, 127)
    return on_grid(x / scale, zero, torch.int8), scale[:, 0], zero[:, 0].int()


def quantize_per_tensor(
    x: torch.Tensor,
    scale: torch.Tensor,
    dtype: torch.dtype,
    *,
    zero_point: torch.Tensor | None = None,
) -> torch.Tensor:
    """Quantise x with one fixed scale."""
    return on_grid(x.float() / scale, zero_point, dtype)


def static_scales(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return `scale` for each row of x; NaN for those that hold a NaN, which int8 cannot code."""
    scales = scale.expand(len(x)).clone()
    if dtype is torch.int8:
        scales[x.isnan().any(1)] = math.nan
    return scales


def quantize(
    x: torch.Tensor,
    dtype: torch.dtype,
    scale: torch.Tensor | None,
    zero_point: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise x by a fixed scale, or each row by its own; return (values, scale of each row)."""
    if scale is None:
        return quantize_per_token(x, dtype)
    values = quantize_per_tensor(x, scale, dtype, zero_point=zero_point)
    return values, static_scales(x, scale, dtype)


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    residual: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Return x / sqrt(mean(x²) + eps) · weight, of the rounded sum x + residual if given."""
    if residual is not None:
        x = x + residual
    x = x.to(dtype)
    return x / torch.sqrt(x.square().mean(-1, keepdim=True) + eps) * weight.to(dtype)


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Return (x - mean) / sqrt(variance + eps) · weight + bias, of x + residual if given."""
    if residual is not None:
        x = x + residual
    x = x.to(dtype)
    normed = rms_norm(x - x.mean(-1, keepdim=True), weight, eps, dtype=dtype)
    return normed if bias is None else normed + bias.to(dtype)


def activation(x: torch.Tensor, kind: str, *, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return f(x), or f(gate)·up of x = [gate | up]."""
    function, gated, _ = kind.partition("_mul")
    x, *up = x.to(dtype).chunk(2, dim=-1) if gated else (x.to(dtype),)
    y = {
        "silu": lambda: x * torch.sigmoid(x),
        "gelu": lambda: x * (1 + torch.erf(x / math.sqrt(2))) / 2,
        "gelu_tanh": lambda: x * torch.sigmoid(math.sqrt(8 / math.pi) * (x + 0.044715 * x**3)),
        "relu": lambda: x.clamp(min=0),
        "relu2": lambda: x.clamp(min=0).square(),
    }[function]()
    return y * up[0] if gated else y


def silu_mul(x: torch.Tensor, *, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return silu(gate)·up of x = [gate | up]."""
    return activation(x, "silu_mul", dtype=dtype)


def rms_norm_quantize(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    dtype: torch.dtype,
    *,
    residual: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    zero_point: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalise in fp32, then quantise; return (values, scale)."""
    return quantize(rms_norm(x, weight, eps, residual=residual), dtype, scale, zero_point)


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
) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalise in fp32, then quantise; return (values, scale)."""
    normalized = layer_norm(x, weight, eps, bias=bias, residual=residual)
    return quantize(normalized, dtype, scale, zero_point)


def activation_quantize(
    x: torch.Tensor,
    kind: str,
    dtype: torch.dtype,
    *,
    scale: torch.Tensor | None = None,
    zero_point: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply the function in fp32, then quantise; return (values, scale)."""
    return quantize(activation(x, kind), dtype, scale, zero_point)


def silu_mul_quantize(
    x: torch.Tensor,
    dtype: torch.dtype,
    *,
    scale: torch.Tensor | None = None,
    zero_point: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gate in fp32, then quantise; return (values, scale)."""
    return activation_quantize(x, "silu_mul", dtype, scale=scale, zero_point=zero_point)


def rms_norm_quantize_per_group(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    residual: torch.Tensor | None = None,
    power_of_two: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalise in fp32, then quantise by groups; return (values, scale)."""
    normalized = rms_norm(x, weight, eps, residual=residual)
    return quantize_per_group(normalized, power_of_two=power_of_two)


def layer_norm_quantize_per_group(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    power_of_two: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalise in fp32, then quantise by groups; return (values, scale)."""
    normalized = layer_norm(x, weight, eps, bias=bias, residual=residual)
    return quantize_per_group(normalized, power_of_two=power_of_two)


def activation_quantize_per_group(
    x: torch.Tensor, kind: str, *, power_of_two: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply the function in fp32, then quantise by groups; return (values, scale)."""
    return quantize_per_group(activation(x, kind), power_of_two=power_of_two)


def silu_mul_quantize_per_group(
    x: torch.Tensor, *, power_of_two: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gate in fp32, then quantise by groups; return (values, scale)."""
    return activation_quantize_per_group(x, "silu_mul", power_of_two=power_of_two)


def rms_norm_quantize_asymmetric(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    residual: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Normalise in fp32, then quantise; return (values, scale, zero point)."""
    return quantize_asymmetric(rms_norm(x, weight, eps, residual=residual))


def layer_norm_quantize_asymmetric(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Normalise in fp32, then quantise; return (values, scale, zero point)."""
    return quantize_asymmetric(layer_norm(x, weight, eps, bias=bias, residual=residual))


def activation_quantize_asymmetric(
    x: torch.Tensor, kind: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Apply the function in fp32, then quantise; return (values, scale, zero point)."""
    return quantize_asymmetric(activation(x, kind))
