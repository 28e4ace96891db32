"""Which kernels and tiles are worth timing for a product: all that may be the fastest, few more."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from ostinato.bench.gemm_cases import Case
from ostinato.kernels.variants import GemmSmallM, GemmTiled
from ostinato.ops.gemm_table import H200_SMS, Choice, GemmVariant, can_split, serving
from ostinato.ops.packing import TILE_CHANNELS
from ostinato.ops.sizes import ceil_div, round_up

# Up to here reading the weights takes the time, beyond it multiplying does.
_WEIGHTS_BOUND_M = 256
_MOST_TOKEN_TILES = 4  # of weights-bound products: each of them reads the weights again
# What takes longer than the best by an estimate is not timed; with few tokens, where latencies
# that it leaves out count, it may take twice as long.
_WITHIN = 1.35
_WITHIN_FEW_TOKENS = 2.0
# Products that an SM of an H200 computes while it loads a byte from the L2, and while its share of
# the memory bandwidth brings one.
_PRODUCTS_PER_L2_BYTE = 100
_PRODUCTS_PER_BYTE = 210
_BANDED_M = 1024  # with fewer tokens all tiles of a band are in flight anyway
_BANDS = (0, 8, 16)
# (cluster, split_k), the simplest first.
_SHARED = ((1, 1), (2, 1), (2, 2))
_MMA_CHANNELS = 64
_MMA_TOKENS = 8


def candidates(case: Case, variants: Iterable[GemmVariant], *, sms: int = H200_SMS) -> list[Choice]:
    """Return the choices to time for a product, the simplest ones first.

    Args:
        case: the product.
        variants: compiled kernels of one dtype, output dtype and kind of accumulation.
        sms: multiprocessors of the GPU.
    """
    given = list(variants)
    tiled = sorted(
        (v for v in given if isinstance(v, GemmTiled)), key=lambda v: (v.channels, v.tokens)
    )
    found = dict.fromkeys([*_streaming(case.m, given), *_tiled(case, tiled, sms)])
    n = case.shape.n
    return [c for c in found if serving(c, case.m, n, True, True, False, sms) == c]


def _streaming(m: int, variants: Sequence[GemmVariant]) -> Iterator[Choice]:
    able = [v for v in variants if isinstance(v, GemmSmallM) and v.max_m >= m]
    least = min((v.max_m for v in able), default=0)
    return (Choice(v) for v in able if v.max_m == least)


class _Plan(NamedTuple):
    """A choice that leaves the band open."""

    variant: GemmTiled
    channels: int
    tokens: int
    cluster: int
    split_k: int


def _tiled(case: Case, variants: Sequence[GemmTiled], sms: int) -> Iterator[Choice]:
    tiles = [
        (variant, channels, tokens)
        for variant in variants
        for tokens in _tile_tokens(case.m, variant, variants)
        for channels in _tile_channels(case, variant, tokens, variants, sms)
    ]
    plans = [_Plan(*tile, *shared) for shared in _SHARED for tile in tiles]
    plans = [plan for plan in plans if _is_possible(case, plan, sms)]
    estimates = [_estimate(case, plan, sms) for plan in plans]
    within = _WITHIN if case.m > _WEIGHTS_BOUND_M else _WITHIN_FEW_TOKENS
    most = within * min(estimates, default=0)
    for plan, estimate in zip(plans, estimates, strict=True):
        if estimate <= most:
            several = ceil_div(case.m, plan.tokens) > 1
            for band in _BANDS if several and case.m >= _BANDED_M else (0,):
                yield Choice(
                    plan.variant,
                    tile_channels=plan.channels,
                    tile_tokens=plan.tokens,
                    cluster=plan.cluster,
                    split_k=plan.split_k,
                    band=band,
                )


def _is_possible(case: Case, plan: _Plan, sms: int) -> bool:
    """Return whether the kernel can and should work so."""
    if plan.cluster > 1 and plan.channels >= case.shape.n:
        return False
    choice = Choice(plan.variant, plan.channels, plan.tokens, plan.cluster, plan.split_k)
    return plan.split_k == 1 or can_split(choice, case.m, case.shape.n, sms)


def _tile_tokens(m: int, variant: GemmTiled, variants: Sequence[GemmTiled]) -> Iterator[int]:
    """Yield tokens per tile that share m evenly, and for which no smaller kernel would do."""
    smaller = max(
        (
            v.tokens
            for v in variants
            if v.channels == variant.channels and v.tokens < variant.tokens
        ),
        default=0,
    )
    most = _MOST_TOKEN_TILES if m <= _WEIGHTS_BOUND_M else ceil_div(m, variant.tokens)
    for tiles in range(1, most + 1):
        tokens = round_up(ceil_div(m, tiles), _MMA_TOKENS)
        if smaller < tokens <= variant.tokens:
            yield tokens


def _tile_channels(
    case: Case, variant: GemmTiled, tokens: int, variants: Sequence[GemmTiled], sms: int
) -> Iterator[int]:
    """Yield channels per tile: the whole, and those that give all SMs equally many tiles.

    The latter are the fewest with which the tiles take no more passes over the SMs than whole ones
    do, or one more; and twice as many, for half of the SMs.
    """
    n, token_tiles = case.shape.n, ceil_div(case.m, tokens)
    smaller = max(
        (v.channels for v in variants if v.channels < variant.channels and v.tokens >= tokens),
        default=0,
    )
    found = [variant.channels]
    fewest = ceil_div(ceil_div(n, variant.channels) * token_tiles, sms)
    for passes in (fewest, fewest + 1):
        columns = sms * passes // token_tiles
        if columns:
            even = round_up(ceil_div(n, columns), TILE_CHANNELS)
            found += [even, 2 * even]
    for channels in dict.fromkeys(found):
        if smaller < channels <= variant.channels:
            yield channels


def _estimate(case: Case, plan: _Plan, sms: int) -> int:
    """Return how long the busiest SM works for one step of K, in products."""
    tiles = ceil_div(case.shape.n, plan.channels) * ceil_div(case.m, plan.tokens)
    multiplied = round_up(plan.channels, _MMA_CHANNELS) * plan.variant.tokens
    loaded = _PRODUCTS_PER_L2_BYTE * (plan.channels + plan.tokens)
    streamed = _PRODUCTS_PER_BYTE * case.shape.n // sms
    passes = ceil_div(tiles * plan.split_k, sms)
    return max(passes * max(multiplied, loaded) // plan.split_k, streamed)
