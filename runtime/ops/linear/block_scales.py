"""Scales of FP8 weights in blocks, and of activations in groups: how they lie in memory.

A group is `GROUP` of K. A block of a weight is `GROUP` output channels of one group. A layer made
of several weights, one under another, has the blocks of each. Where these begin at multiples of
`GROUP` channels, kernels look scales up for each `GROUP` of them, and otherwise for each
`SCALE_CHANNELS`, which takes longer.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..common.sizes import ceil_div, round_up
from .gemm_operands import aligned_copy, is_aligned
from .quantize_cuda import GROUP

SCALE_CHANNELS = 8  # csrc/gemm_w8a8/tiled/config.cuh: kScaleChannels
_ALIGNMENT = 4  # elements of fp32: TMA asks for rows at multiples of 16 bytes


def empty_scales(groups: int, columns: int, device: torch.device) -> torch.Tensor:
    """Return memory for fp32 scales [groups, columns], in rows as kernels read them."""
    padded = round_up(columns, _ALIGNMENT)
    return torch.empty(groups, padded, dtype=torch.float32, device=device)[:, :columns]


def aligned_scales(scales: torch.Tensor) -> torch.Tensor:
    """Return scales [groups, columns] in rows as kernels read them: a copy, unless they are so."""
    return scales if is_aligned(scales) else aligned_copy(scales)


def check_channels(kept: Sequence[slice], step: int = SCALE_CHANNELS) -> None:
    """Check which channels of each weight of a layer are taken; see `channel_scales`.

    Raises:
        ValueError: for channels that are no multiples of `step`.
    """
    for index, channels in enumerate(kept):
        if not _are_multiples([channels], step, open_end=index == len(kept) - 1):
            raise ValueError(
                f"blocks: got channels {channels.start} to {channels.stop} of a weight, "
                f"expected multiples of {step}"
            )


def _are_multiples(kept: Sequence[slice], step: int, *, open_end: bool = True) -> bool:
    """Return whether all begin at multiples of `step`, and all but the last have whole steps."""
    counts = [channels.stop - channels.start for channels in kept]
    whole = counts[:-1] if open_end else counts
    return not any(size % step for size in (*whole, *(channels.start for channels in kept)))


def scale_channels(w_scale: torch.Tensor, n: int) -> int:
    """Return how many of n channels share a scale: `SCALE_CHANNELS` or, if there are less, `GROUP`.

    Args:
        w_scale: [groups, columns].
        n: channels of the weight.
    """
    return SCALE_CHANNELS if w_scale.size(1) == ceil_div(n, SCALE_CHANNELS) else GROUP


def channel_scales(
    blocks: list[tuple[torch.Tensor, slice]], *, channels: int | None = None
) -> torch.Tensor:
    """Return the scales of the channels of a layer, as `fp8_block_linear` takes them.

    Args:
        blocks: of each weight of the layer, in the order of its channels: the scales of its blocks
            [ceil(n / 128), ceil(k / 128)], and which of its channels the layer has. These begin at
            a multiple of 8 and, but for the last weight's, are a multiple of 8.
        channels: how many of the layer's channels share a scale, 8 or 128. By default 128, with
            which products are faster, if no block begins or ends between multiples of 128.

    Returns:
        fp32 [ceil(k / 128), ceil(n / channels)], for the n channels of the layer.

    Raises:
        ValueError: for channels that are no multiples of 8, or of `channels`.
    """
    kept_channels = [kept for _, kept in blocks]
    if channels is None:
        channels = GROUP if _are_multiples(kept_channels, GROUP) else SCALE_CHANNELS
    elif channels not in (SCALE_CHANNELS, GROUP):
        raise ValueError(f"channels: got {channels}, expected {SCALE_CHANNELS} or {GROUP}")
    check_channels(kept_channels, channels)
    rows = []
    for scales, kept in blocks:
        count = kept.stop - kept.start
        first = kept.start + channels * torch.arange(
            ceil_div(count, channels), device=scales.device
        )
        rows.append(scales.float()[first // GROUP])
    of_channels = torch.cat(rows).t()
    groups, columns = of_channels.shape
    return empty_scales(groups, columns, of_channels.device).copy_(of_channels)
