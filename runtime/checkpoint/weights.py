"""Rounds a weight matrix to 8 bits with one scale per output row, or per block."""

from __future__ import annotations

import torch
from torch.nn import functional

from ..ops.common.sizes import ceil_div

# Rows are quantised in blocks of about this many elements, which bounds the fp32 copies.
_BLOCK_ELEMENTS = 1 << 22

_BLOCK = 128
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


def quantize_weight_blocks(
    weight: torch.Tensor, scale_dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise a weight to e4m3, each block of 128 by 128 with a scale of its own.

    Scales are those of `quantize_weight`. Blocks at the edges may be smaller.

    Args:
        weight: [N, K] bf16, fp16 or fp32.
        scale_dtype: bf16, fp16 or fp32.

    Returns:
        (values [N, K] e4m3, scale [ceil(N / 128), ceil(K / 128)] of `scale_dtype`).

    Raises:
        ValueError: when the weight holds NaN, an infinity, or numbers too large for a scale.
    """
    (n, k), dtype = weight.shape, torch.float8_e4m3fn
    shape = (ceil_div(n, _BLOCK), ceil_div(k, _BLOCK))
    values = torch.empty(n, k, dtype=dtype, device=weight.device)
    scale = torch.empty(shape, dtype=scale_dtype, device=weight.device)
    for index, (source, value) in enumerate(
        zip(weight.split(_BLOCK), values.split(_BLOCK), strict=True)
    ):
        rows = len(source)
        padded = functional.pad(source.float(), (0, -k % _BLOCK)).view(rows, -1, _BLOCK)
        # A row for each block: its scale is then that of a row.
        by_block = padded.transpose(0, 1).reshape(shape[1], -1)
        codes, of_block = quantize_weight(by_block, dtype, scale_dtype)
        scale[index] = of_block[:, 0]
        whole = codes.view(shape[1], rows, _BLOCK).transpose(0, 1).reshape(rows, -1)
        value.copy_(whole[:, :k])
    return values, scale


def _row_scale(exact: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    rounded = exact.to(dtype)
    # Below the smallest normal number rounding is so coarse that it could saturate a row.
    bits = torch.int16 if dtype.itemsize == 2 else torch.int32
    above = (rounded.view(bits) + 1).view(dtype)
    coarse = (exact < torch.finfo(dtype).tiny) & (rounded.float() < exact)
    return torch.where(exact > 0, torch.where(coarse, above, rounded), torch.ones_like(rounded))
