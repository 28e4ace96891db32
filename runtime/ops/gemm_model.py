"""How long the tiled GEMM takes, as its choice needs to know: which ways to cut an output are fast.

A model of few numbers: the busiest SM's clocks, and the time that memory needs for the weights. The
numbers were fitted to the times of some 2000 ways to multiply 8 shapes of weights by 16 to 1024
tokens on an H200, and of another 1900 with 256 to 8192 tokens on a card at rest. They are effective
ones, not a data sheet's. docs/gemm_tiled.md says how well they fit.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ostinato.kernels.variants import GemmTiled
from ostinato.ops.packing import TILE_CHANNELS
from ostinato.ops.sizes import ceil_div

_GHZ = 1.515
_BYTES_PER_US = 4.5e6  # of memory
_LATENCY_US = 2.58  # of a launch that waits for memory only
_LAUNCH_CLOCKS = 2680
_ALONE_CLOCKS = 94  # that a launch without clusters saves
# For 128 of K, of which the largest counts, more or less:
_STEP_CLOCKS = 152  # at least
_ROW_CLOCKS = 2.14  # of TMA, for a row of 128 bytes
_SHARED_BYTES_PER_CLOCK = 176
_MMA_CLOCKS = 1.04  # of the tensor cores, as a multiple of what they should take
# And in addition for a row of weights, which come from memory, and of tokens, which others ask for,
# too. With many tokens both come from the L2.
_WEIGHT_ROW_CLOCKS, _TOKEN_ROW_CLOCKS = 0.56, 0.1
_WIDE = 0.97  # of the clocks of a step: 256 tokens, channels as rows
_EPILOGUE_CLOCKS = 7.8  # for a column
# The widest tile is stored while the next one is summed: what is left for each, and at the end.
_PACKING_CLOCKS, _LAST_EPILOGUE_CLOCKS = 6.4, 10.7
_EXCHANGE_CLOCKS = 2500  # of CTAs that share K
_EXCHANGE_CLOCKS_PER_RESULT = 2570 / 128**2  # of their tile
_STEP_DEPTH = 128
_MMA_ROWS = 64
_WIDE_TOKENS = 256
_NORM = 6
# Of all that, where every SM has one tile at most and no other CTA to wait for, so many tokens at
# least: found with 257 to 768, where clusters were chosen that took a third longer.
_AT_ONCE, _AT_ONCE_M = 0.86, 257
# So few tokens are not worth waiting for the other CTA of a cluster, the less so where some of them
# lie beyond the last: 8.2 µs became 9.0 (docs/results/h200/lab/bench-edges.txt, 17 tokens).
_LONELY_TOKENS = 48
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
                if splits(variant, ceil_div(columns, 2) * tiles, sms):
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
    if m <= _CUT_M:
        step += _WEIGHT_ROW_CLOCKS * weight_rows + _TOKEN_ROW_CLOCKS * token_rows
    clocks = float(_LAUNCH_CLOCKS - (_ALONE_CLOCKS if cluster == 1 else 0))
    steps = rounds * ceil_div(k, _STEP_DEPTH)
    if variant.pingpong:
        # One warpgroup stores a whole tile while the other multiplies; none does at the end.
        clocks += steps * step + 2 * _EPILOGUE_CLOCKS * mma_columns
    elif variant.tokens == _WIDE_TOKENS:
        epilogues = _PACKING_CLOCKS * (whole + bool(left)) + _LAST_EPILOGUE_CLOCKS
        clocks += _WIDE * steps * step + epilogues * mma_columns
    else:
        clocks += steps * step + _EPILOGUE_CLOCKS * mma_columns * (whole + bool(left))
    if split_k:
        results = variant.channels * variant.tokens
        clocks += _EXCHANGE_CLOCKS + _EXCHANGE_CLOCKS_PER_RESULT * results
    memory = n * k / _BYTES_PER_US + _LATENCY_US
    at_once = _AT_ONCE if cluster == 1 and groups <= sms and m >= _AT_ONCE_M else 1.0
    return at_once * _about_largest(clocks / _GHZ / 1e3, memory)


def _about_largest(*values: float) -> float:
    return float(sum(value**_NORM for value in values) ** (1 / _NORM))
