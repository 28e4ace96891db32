"""How long the tiled GEMM takes, as its choice needs to know: which ways to cut an output are fast.

A model of few numbers: the busiest SM's clocks, and the time that memory needs for the weights. The
numbers were fitted to some 36000 times, of 18 shapes of weights by 16 to 4096 tokens, on an H200
and an H100: not so that the times come out, but so that the fastest way is found. They are
effective ones, not a data sheet's. docs/gemm_tiled.md says how well they do.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ostinato.kernels.variants import GemmTiled
from ostinato.ops.packing import TILE_CHANNELS
from ostinato.ops.sizes import ceil_div

_GHZ = 1.515
_BYTES_PER_US = 4.5e6  # of memory
_LATENCY_US = 1.0  # of a launch that waits for memory only
_LAUNCH_CLOCKS = 4390
# On SMs that a launch leaves idle the next one begins: of latency and launch so much less is left,
# as a multiple of the share of idle SMs.
_IDLE = 1.27
_ALONE_CLOCKS = 1600  # that a launch without clusters saves of what is left
_FEW_CLOCKS, _FEW_TOKENS = 1115, 32  # that tiles for so many tokens, which turn results, add
# For 128 of K, of which the largest counts, more or less:
_STEP_CLOCKS = 122  # at least
_ROW_CLOCKS = 1.61  # of TMA, for a row of 128 bytes
_SHARED_BYTES_PER_CLOCK = 208
_MMA_CLOCKS = 0.926  # of the tensor cores, as a multiple of what they should take
_WEIGHT_ROW_CLOCKS = 1.31  # and in addition for a row of weights; with many tokens the L2 has them
_STAGE_CLOCKS = 49  # likewise for a stage of the ring, of 128 to 512 of K
_WIDE = 0.988  # of the clocks of a step: 256 tokens, channels as rows
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
# lie beyond the last: 8.2 µs became 9.0 (docs/results/h200/lab/bench-edges.txt, 17 tokens).
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


class Cut(NamedTuple):
    """How a launch of the tiled kernel cuts its output; see `gemm_table.Choice`."""

    tile_channels: int
    tile_tokens: int
    cluster: int
    share_weights: int
    split_k: int


def cuts(variant: GemmTiled, m: int, n: int, sms: int) -> Iterator[Cut]:
    """Yield the ways to cut an output [m, n] that may be the fastest for a kernel."""
    units = ceil_div(n, TILE_CHANNELS)
    whole = variant.channels // TILE_CHANNELS
    part = _LEAST_PART if m <= _CUT_M else _LEAST_PART_LARGE_M if m < _WHOLE_M else 1
    token_tiles = ceil_div(m, variant.tokens)
    if variant.tokens <= _ONE_TILE < m:
        return
    for tiles in (token_tiles, token_tiles + 1) if _ONE_TILE < m < _WHOLE_M else (token_tiles,):
        tokens = ceil_div(m, tiles)
        if ceil_div(m, tokens) < tiles:
            continue
        for channels in range(max(1, int(whole / part)), whole + 1):
            columns = ceil_div(units, channels)
            if variant.pingpong and columns * tiles <= sms:
                continue  # one of the warpgroups would have nothing to do
            size = (channels * TILE_CHANNELS, tokens)
            yield Cut(*size, 1, 0, 0)
            if sms > 1 and columns > 1:
                if tokens > _LONELY_TOKENS:
                    yield Cut(*size, 2, 0, 0)
                # With few tokens not even K is worth sharing, unless SMs would have no weights.
                shares_k = m > _ALONE_M or units < sms
                if shares_k and splits(variant, ceil_div(columns, 2) * tiles, sms):
                    yield Cut(*size, 2, 0, 2)
            if sms > 1 and tiles > 1:
                yield Cut(*size, 2, 1, 0)


def splits(variant: GemmTiled, clusters_of_tiles: int, sms: int) -> bool:
    """Return whether clusters of two CTAs can share K in the last round (csrc: share_out)."""
    at_once = sms // 2
    columns = variant.channels if variant.token_rows else variant.tokens
    able = not variant.pingpong and columns % (2 * TILE_CHANNELS) == 0
    return able and at_once > 0 and 0 < 2 * (clusters_of_tiles % at_once) <= at_once


def predicted_us(variant: GemmTiled, cut: Cut, m: int, n: int, k: int, sms: int) -> float:
    """Return about how long a product takes on an H200, launched with PDL."""
    channels, tokens, cluster, share_weights, split_k = cut
    columns, token_tiles = ceil_div(n, channels), ceil_div(m, tokens)
    if share_weights:
        groups = columns * ceil_div(token_tiles, 2)
    else:
        groups = ceil_div(columns, cluster) * token_tiles
    whole, left = divmod(groups, sms // cluster)
    rounds = whole + (0.5 if split_k else 1) * bool(left)
    rows, mma_columns = (
        (variant.tokens, variant.channels)
        if variant.token_rows
        else (variant.channels, variant.tokens)
    )
    blocks = rows // _MMA_ROWS
    weight_rows = channels / 2 if share_weights else channels
    token_rows = tokens / 2 if cluster == 2 and not share_weights else tokens
    read = blocks * (_MMA_ROWS + mma_columns)
    step = _about_largest(
        _STEP_CLOCKS,
        _MMA_CLOCKS * blocks * mma_columns * 2,
        _ROW_CLOCKS * (weight_rows + token_rows),
        (read + channels + tokens) * _STEP_DEPTH / _SHARED_BYTES_PER_CLOCK,
    )
    step += _STAGE_CLOCKS / (variant.stage_depth // _STEP_DEPTH)
    if m <= _CUT_M:
        step += _WEIGHT_ROW_CLOCKS * weight_rows
    busy = min(groups * cluster, sms // cluster * cluster)
    kept = 1 - min(1.0, _IDLE * (1 - busy / sms))
    clocks = max(0.0, _LAUNCH_CLOCKS * kept - (_ALONE_CLOCKS if cluster == 1 else 0))
    if variant.tokens == _FEW_TOKENS:
        clocks += _FEW_CLOCKS
    steps = rounds * ceil_div(k, _STEP_DEPTH)
    if variant.pingpong:
        # One warpgroup stores a whole tile while the other multiplies; none does at the end.
        clocks += steps * step + 2 * _EPILOGUE_CLOCKS * mma_columns
    elif variant.tokens == _WIDE_TOKENS:
        clocks += _WIDE * steps * step + _LAST_EPILOGUE_CLOCKS * mma_columns
    else:
        clocks += steps * step + _EPILOGUE_CLOCKS * mma_columns * (whole + bool(left))
    if split_k:
        results = variant.channels * variant.tokens
        clocks += _EXCHANGE_CLOCKS + _EXCHANGE_CLOCKS_PER_RESULT * results
    memory = n * k / _BYTES_PER_US + _LATENCY_US * kept
    at_once = _AT_ONCE if cluster == 1 and groups <= sms and m >= _AT_ONCE_M else 1.0
    return at_once * _about_largest(clocks / _GHZ / 1e3, memory)


def _about_largest(*values: float) -> float:
    total = 0.0
    for value in values:
        total += value**_NORM
    return float(total ** (1 / _NORM))
