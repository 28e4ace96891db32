"""Scales of FP8 weights in blocks, and of activations in groups: how they lie in memory.

A group is `GROUP` of K. A block of a weight is `GROUP` output channels of one group. A layer made
of several weights, one under another, has the blocks of each, so that kernels look scales up for
every `SCALE_CHANNELS` channels.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..common.sizes import ceil_div, round_up
from .gemm_operands import aligned_copy, is_aligned
from .quantize_cuda import GROUP

SCALE_CHANNELS = 8  # csrc/gemm_w8a8/packed.h: kScaleChannels
_ALIGNMENT = 4  # elements of fp32: TMA asks for rows at multiples of 16 bytes


def empty_scales(groups: int, columns: int, device: torch.device) -> torch.Tensor:
    """Return memory for fp32 scales [groups, columns], in rows as kernels read them."""
    padded = round_up(columns, _ALIGNMENT)
    return torch.empty(groups, padded, dtype=torch.float32, device=device)[:, :columns]


def aligned_scales(scales: torch.Tensor) -> torch.Tensor:
    """Return scales [groups, columns] in rows as kernels read them: a copy, unless they are so."""
    return scales if is_aligned(scales) else aligned_copy(scales)


def check_channels(kept: Sequence[slice]) -> None:
    """Check which channels of each weight of a layer are taken; see `channel_scales`.

    Raises:
        ValueError: for channels that are no multiples of 8.
    """
    for index, channels in enumerate(kept):
        count = channels.stop - channels.start
        whole = index == len(kept) - 1 or count % SCALE_CHANNELS == 0
        if channels.start % SCALE_CHANNELS or not whole:
            raise ValueError(
                f"blocks: got channels {channels.start} to {channels.stop} of a weight, "
                f"expected multiples of {SCALE_CHANNELS}"
            )


def channel_scales(blocks: list[tuple[torch.Tensor, slice]]) -> torch.Tensor:
    """Return the scales of the channels of a layer, as `fp8_block_linear` takes them.

    Args:
        blocks: of each weight of the layer, in the order of its channels: the scales of its blocks
            [ceil(n / 128), ceil(k / 128)], and which of its channels the layer has. These begin at
            a multiple of 8 and, but for the last weight's, are a multiple of 8.

    Returns:
        fp32 [ceil(k / 128), ceil(channels / 8)].

    Raises:
        ValueError: for channels that are no multiples of 8.
    """
    check_channels([kept for _, kept in blocks])
    rows = []
    for scales, kept in blocks:
        count = kept.stop - kept.start
        first = kept.start + SCALE_CHANNELS * torch.arange(
            ceil_div(count, SCALE_CHANNELS), device=scales.device
        )
        rows.append(scales.float()[first // GROUP])
    return aligned_scales(torch.cat(rows).t().contiguous())
