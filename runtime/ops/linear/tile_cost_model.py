"""How long the tiled GEMM takes, as its choice needs to know: which ways to cut an output are fast.

A model of few numbers: the busiest SM's clocks, and the time that memory needs for the weights. The
numbers were fitted to some 36000 times, of 18 shapes of weights by 16 to 4096 tokens, on an H200
and an H100: not so that the times come out, but so that the fastest way is found. They are
effective ones, not a data sheet's. docs/notebooks/gemm_tiled.md says how well they do.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..common.sizes import ceil_div
from .gemm_variants import GemmTiled
from .packed_weight import TILE_CHANNELS

_GHZ = 1.515
_BYTES_PER_US = 4.5e6  # of memory
_LATENCY_US = 1.0  # of a launch that waits for memory only
_LAUNCH_CLOCKS = 4390
# On SMs that a launch leaves idle the next one begins: of latency and launch so much less is left,
# as a multiple of the share of idle SMs.
_IDLE = 1.27
_ALONE_CLOCKS = 1600  # that a launch without clusters saves of what is left
_FEW_CLOCKS, _FEW_TOKENS = 1115, 32  # that tiles for so many tokens, which turn results, add
# For 128 bytes of K, of which the largest counts, more or less:
_STEP_CLOCKS = 122  # at least
_ROW_CLOCKS = 1.61  # of TMA, for a row of 128 bytes
_SHARED_BYTES_PER_CLOCK = 208
_MMA_CLOCKS = 0.926  # of the tensor cores, as a multiple of what they should take
_WEIGHT_ROW_CLOCKS = 1.31  # and in addition for a row of weights; with many tokens the L2 has them
_STAGE_CLOCKS = 49  # likewise for a stage of the ring, of 128 to 512 bytes of K
_WIDE = 0.988  # of the clocks of a step: 256 tokens, channels as rows
# With block scales, for a step in addition: sums are scaled while shared memory is busy.
_SCALING_CLOCKS = 31
_SCALING_COLUMN_CLOCKS = 0.6
# Tiles for so many tokens scale one piece at a time, which takes longer; the more so if one scale
# is not for 64 channels or more, but for 16 or 32.
_ONE_PIECE_CLOCKS, _ONE_PIECE_TOKENS = 49, 128
_FINE_CLOCKS, _SHARING_CHANNELS = 31, 64
_EPILOGUE_CLOCKS = 8.3  # for a column
# The widest tile is stored while the next one is summed: what is left is at the end.
_LAST_EPILOGUE_CLOCKS = 19.7
_EXCHANGE_CLOCKS = 2790  # of CTAs that share K
_EXCHANGE_CLOCKS_PER_RESULT = 0.5  # of their tile
_STEP_DEPTH = 128
_MMA_ROWS = 64
_WIDE_TOKENS = 256
_NORM = 6
# Of all that, where every SM has one tile at most and no other CTA to wait for, so many tokens at
# least: found with 257 to 768, where clusters were chosen that took a third longer.
_AT_ONCE, _AT_ONCE_M = 0.82, 257
# So few tokens are not worth waiting for the other CTA of a cluster, the less so where some of them
# lie beyond the last: 8.2 µs became 9.0 with 17 tokens (docs/notebooks/gemm_tiled.md).
_LONELY_TOKENS = 48
_ALONE_M = 16
# Weights that are read once have nobody to share them with: so few tokens are in one tile.
_ONE_TILE = 8
# Tiles are cut to no less than this, as there are smaller ones. With many tokens the card is at its
# power limit, and multiplying what nobody looks at takes power: tiles stay whole.
_LEAST_PART = 2
_CUT_M = 512
_LEAST_PART_LARGE_M = 1.25
_WHOLE_M = 2048


_Ints = NDArray[np.int64]
_Floats = NDArray[np.floating]


class Cut(NamedTuple):
    """How a launch of the tiled kernel cuts its output; see `gemm_table.Choice`."""

    tile_channels: int
    tile_tokens: int
    cluster: int
    share_weights: int
    split_k: int


# Who shares what: nobody, tokens, tokens and the K of the last round, weights.
_SHARING = ((1, 0, 0), (2, 0, 0), (2, 0, 2), (2, 1, 0))


def fastest(
    variants: tuple[GemmTiled, ...],
    m: int,
    n: int,
    k: int,
    sms: int,
    *,
    may_split: bool,
) -> tuple[GemmTiled, Cut]:
    """Return the kernel, and the cut, that take the least time by the model.

    All cuts of all kernels are looked at side by side: a server asks hundreds of times when it
    starts.

    Args:
        variants: the kernels to choose from, of one dtype of operands.
        m: tokens, at least 1.
        n: output channels.
        k: input features.
        sms: multiprocessors of the GPU.
        may_split: whether CTAs may share K.
    """
    found = _predict(variants, m, n, k, sms, may_split)
    return found.way(int(found.us.argmin()))


def predictions(
    variants: tuple[GemmTiled, ...], m: int, n: int, k: int, sms: int
) -> list[tuple[float, GemmTiled, Cut]]:
    """Return the ways that may be the fastest and about how long each takes on an H200, in µs.

    The arguments are those of `fastest`.
    """
    found = _predict(variants, m, n, k, sms, True)
    return [(float(us), *found.way(index)) for index, us in enumerate(found.us)]


@dataclass(frozen=True)
class _Tiles:
    """Kernels, with each number of channels that their tiles may have, and one more tile or not.

    Channels are counted in units of 16; those that were compiled are `most_channels`, tokens
    likewise. The MMA has so many rows and columns, and a stage of the ring so many of 128 of K.
    """

    variant: _Ints
    channels: _Ints
    one_more: _Ints  # tiles of tokens than needed
    most_channels: _Ints
    most_tokens: _Ints
    pingpong: _Ints
    mma_rows: _Ints
    mma_columns: _Ints
    stage_steps: _Ints
    shares_k: _Ints  # whether two CTAs can

    def take(self, which: _Ints) -> _Tiles:
        return _Tiles(*(column[which] for column in vars(self).values()))


@dataclass(frozen=True)
class _Predicted:
    """Ways to compute a product: kernels, tiles and tokens of each, an index of `_SHARING`, µs."""

    variants: tuple[GemmTiled, ...]
    tiles: _Tiles
    tokens: _Ints
    sharing: _Ints
    us: _Floats

    def way(self, index: int) -> tuple[GemmTiled, Cut]:
        channels = int(self.tiles.channels[index]) * TILE_CHANNELS
        cut = Cut(channels, int(self.tokens[index]), *_SHARING[self.sharing[index]])
        return self.variants[self.tiles.variant[index]], cut


def _predict(
    variants: tuple[GemmTiled, ...], m: int, n: int, k: int, sms: int, may_split: bool
) -> _Predicted:
    every = _tiles_of(variants)
    which, sharing = _cuts(every, m, n, sms, may_split)
    tiles = every.take(which)
    tokens = -(-m // (-(-m // tiles.most_tokens) + tiles.one_more))
    cluster, share_weights, split_k = np.array(_SHARING).T[:, sharing]
    # Copies and MMAs take as long for a byte of K in each dtype.
    k_bytes = k * variants[0].operand_bytes
    scaled = variants[0].block_scales
    us = _predicted_us(tiles, tokens, cluster, share_weights, split_k, m, n, k_bytes, sms, scaled)
    return _Predicted(variants, tiles, tokens, sharing, us)


@cache
def _tiles_of(variants: tuple[GemmTiled, ...]) -> _Tiles:
    rows = []
    for index, variant in enumerate(variants):
        whole = variant.channels // TILE_CHANNELS
        mma = (variant.channels, variant.tokens)
        kernel = (
            whole,
            variant.tokens,
            variant.pingpong,
            *(mma[::-1] if variant.token_rows else mma),
            variant.stage_depth // _STEP_DEPTH,
            _can_share_k(variant),
        )
        for one_more in range(2):
            rows += [(index, units, one_more, *kernel) for units in range(1, whole + 1)]
    return _Tiles(*np.array(rows, dtype=np.int64).reshape(-1, len(fields(_Tiles))).T)


def _cuts(tiles: _Tiles, m: int, n: int, sms: int, may_split: bool) -> tuple[_Ints, _Ints]:
    """Return which tiles may be the fastest ones, and who shares what then."""
    units = ceil_div(n, TILE_CHANNELS)
    part = _LEAST_PART if m <= _CUT_M else _LEAST_PART_LARGE_M if m < _WHOLE_M else 1
    token_tiles = -(-m // tiles.most_tokens) + tiles.one_more
    tokens = -(-m // token_tiles)
    columns = -(-units // tiles.channels)
    useful = tiles.channels >= (tiles.most_channels / part).astype(np.int64)
    useful &= -(-m // tokens) == token_tiles
    if m > _ONE_TILE:
        useful &= tiles.most_tokens > _ONE_TILE
    if not _ONE_TILE < m < _WHOLE_M:
        useful &= tiles.one_more == 0
    # Or one of the warpgroups would have nothing to do.
    useful &= (tiles.pingpong == 0) | (columns * token_tiles > sms)
    pairs = useful & (columns > 1) & (sms > 1)
    # With few tokens not even K is worth sharing, unless SMs would have no weights.
    splits = pairs & (tiles.shares_k == 1) & (may_split and (m > _ALONE_M or units < sms))
    splits &= _leaves_idle(-(-columns // 2) * token_tiles, max(sms // 2, 1))
    shares_tokens = pairs & (tokens > _LONELY_TOKENS)
    shares_weights = useful & (token_tiles > 1) & (sms > 1)
    found = np.stack((useful, shares_tokens, splits, shares_weights), axis=1).nonzero()
    return found[0], found[1]


def splits(variant: GemmTiled, clusters_of_tiles: int, sms: int) -> bool:
    """Return whether clusters of two CTAs can share K in the last round (csrc: share_out)."""
    at_once = sms // 2
    if at_once == 0 or not _can_share_k(variant):
        return False
    return bool(_leaves_idle(np.array(clusters_of_tiles), at_once))


def _can_share_k(variant: GemmTiled) -> bool:
    columns = variant.channels if variant.token_rows else variant.tokens
    return not variant.pingpong and columns % (2 * TILE_CHANNELS) == 0


def _leaves_idle(clusters_of_tiles: _Ints, at_once: int) -> NDArray[np.bool_]:
    """Return whether the last round has tiles for half of the clusters at most, and some."""
    left = 2 * (clusters_of_tiles % at_once)
    return (left > 0) & (left <= at_once)


def _predicted_us(
    rows: _Tiles,
    tokens: _Ints,
    cluster: _Ints,
    share_weights: _Ints,
    split_k: _Ints,
    m: int,
    n: int,
    k_bytes: int,
    sms: int,
    scaled: bool,
) -> _Floats:
    """Return about how long products take on an H200, launched with PDL."""
    channels = rows.channels * TILE_CHANNELS
    columns, token_tiles = -(-n // channels), -(-m // tokens)
    shares_tokens = (cluster == 2) & (share_weights == 0)
    groups = np.where(
        share_weights == 1, columns * -(-token_tiles // 2), -(-columns // cluster) * token_tiles
    )
    whole, left = np.divmod(groups, sms // cluster)
    rounds = whole + np.where(split_k > 0, 0.5, 1.0) * (left > 0)
    blocks = rows.mma_rows // _MMA_ROWS
    weight_rows = np.where(share_weights == 1, channels / 2, channels)
    token_rows = np.where(shares_tokens, tokens / 2, tokens)
    read = blocks * (_MMA_ROWS + rows.mma_columns)
    step = _about_largest(
        _STEP_CLOCKS,
        _MMA_CLOCKS * blocks * rows.mma_columns * 2,
        _ROW_CLOCKS * (weight_rows + token_rows),
        (read + channels + tokens) * _STEP_DEPTH / _SHARED_BYTES_PER_CLOCK,
    )
    step += _STAGE_CLOCKS / rows.stage_steps
    if scaled:
        fine = rows.mma_columns % _SHARING_CHANNELS > 0
        of_piece = _ONE_PIECE_CLOCKS + np.where(fine, _FINE_CLOCKS, 0.0)
        step += _SCALING_CLOCKS + _SCALING_COLUMN_CLOCKS * rows.mma_columns
        step += np.where(rows.most_tokens == _ONE_PIECE_TOKENS, of_piece, 0.0)
    if m <= _CUT_M:
        step += _WEIGHT_ROW_CLOCKS * weight_rows
    busy = np.minimum(groups * cluster, sms // cluster * cluster)
    kept = 1 - np.minimum(1.0, _IDLE * (1 - busy / sms))
    clocks = np.maximum(0.0, _LAUNCH_CLOCKS * kept - _ALONE_CLOCKS * (cluster == 1))
    clocks += _FEW_CLOCKS * (rows.most_tokens == _FEW_TOKENS)
    wide = rows.most_tokens == _WIDE_TOKENS
    clocks += rounds * ceil_div(k_bytes, _STEP_DEPTH) * step * np.where(wide, _WIDE, 1.0)
    # Of ping-pong one warpgroup stores a whole tile while the other multiplies; none does at the
    # end.
    epilogues = np.where(rows.pingpong == 1, 2, whole + (left > 0)) * _EPILOGUE_CLOCKS
    clocks += np.where(wide, _LAST_EPILOGUE_CLOCKS, epilogues) * rows.mma_columns
    results = rows.most_channels * TILE_CHANNELS * rows.most_tokens
    exchange = _EXCHANGE_CLOCKS + _EXCHANGE_CLOCKS_PER_RESULT * results
    clocks += np.where(split_k > 0, exchange, 0.0)
    memory = n * k_bytes / _BYTES_PER_US + _LATENCY_US * kept
    at_once = (cluster == 1) & (groups <= sms) & (m >= _AT_ONCE_M)
    return np.where(at_once, _AT_ONCE, 1.0) * _about_largest(clocks / _GHZ / 1e3, memory)


def _about_largest(*values: _Floats | float) -> _Floats:
    total = sum(np.power(value, _NORM) for value in values)
    return np.asarray(total ** (1 / _NORM))
