"""Rounds a weight matrix to 8 bits with one scale per output row."""

from __future__ import annotations

import torch

# Rows are quantised in blocks of about this many elements, which bounds the fp32 copies.
_BLOCK_ELEMENTS = 1 << 22

_GRID_MAX = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
QUANTIZED_DTYPES = tuple(_GRID_MAX)


def quantize_weight(
    weight: torch.Tensor, dtype: torch.dtype, scale_dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise a weight symmetrically, each row with a scale of its own.

    The scale is amax / 127 (int8) or amax / 448 (e4m3), rounded to `scale_dtype` before the row
    is divided by it: readers that keep scales in that dtype then see the weights meant here.
    A row of zeros gets the scale 1.

    Args:
        weight: [N, K] bf16, fp16 or fp32.
        dtype: int8 or float8_e4m3fn.
        scale_dtype: bf16, fp16 or fp32.

    Returns:
        (values [N, K] of `dtype`, scale [N, 1] of `scale_dtype`) with weight ≈ values · scale.

    Raises:
        ValueError: when the weight holds NaN, an infinity, or numbers too large for a scale.
    """
    values = torch.empty(weight.shape, dtype=dtype, device=weight.device)
    scale = torch.empty(weight.shape[0], 1, dtype=scale_dtype, device=weight.device)
    rows = max(1, _BLOCK_ELEMENTS // max(1, weight.shape[1]))
    for source, value, row_scale in zip(
        weight.split(rows), values.split(rows), scale.split(rows), strict=True
    ):
        block = source.float()
        amax = block.abs().amax(1, keepdim=True)
        row_scale.copy_(_row_scale(amax / _GRID_MAX[dtype], scale_dtype))
        if not (amax.isfinite() & row_scale.isfinite()).all():
            raise ValueError(f"holds NaN, an infinity or numbers beyond the range of {scale_dtype}")
        grid = (block / row_scale.float()).clamp_(-_GRID_MAX[dtype], _GRID_MAX[dtype])
        value.copy_(grid.round_() if dtype is torch.int8 else grid)
    return values, scale


def _row_scale(exact: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    rounded = exact.to(dtype)
    # Below the smallest normal number rounding is so coarse that it could saturate a row.
    bits = torch.int16 if dtype.itemsize == 2 else torch.int32
    above = (rounded.view(bits) + 1).view(dtype)
    coarse = (exact < torch.finfo(dtype).tiny) & (rounded.float() < exact)
    return torch.where(exact > 0, torch.where(coarse, above, rounded), torch.ones_like(rounded))
