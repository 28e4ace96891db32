"""Which kernel multiplies matrices of which dtype and sizes: a table, with a reason for each row.

The table is data; `choose` reads it. Its first rows say for which sizes they hold; among the others
the model of `gemm_model` finds the fastest. What `python -m ostinato tune` measured on a machine
goes before both: see `ostinato.ops.linear.tile_tuning`.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, fields, replace
from functools import cache, cached_property, lru_cache

from ...jit.variant import OPERAND_DTYPES
from ..common import checks
from ..common.sizes import ceil_div, round_up
from . import tile_cost_model
from .gemm_variants import (
    BLOCK_E4M3,
    DTYPES_16_BIT,
    GEMM_SMALL_M,
    GEMM_TILED,
    GemmSmallM,
    GemmTiled,
)
from .packed_weight import TILE_CHANNELS

GemmVariant = GemmSmallM | GemmTiled

H200_SMS = 132


@dataclass(frozen=True)
class Choice:
    """A kernel and how it cuts the output; a number that is 0 is left to the kernel's launch.

    Args:
        variant: the kernel.
        tile_channels: channels of a tile, a multiple of 16, at most those compiled.
        tile_tokens: tokens of a tile, at most those compiled.
        cluster: CTAs that share what they copy: 1 or 2.
        share_weights: 1: they are of neighbouring tokens and share their weights; 0: they are of
            neighbouring channels and share their tokens.
        split_k: 2: the CTAs of a cluster share K of the last round's tiles, where these would leave
            half of the SMs idle (`can_split`).
        band: tiles of channels that are walked side by side.
    """

    variant: GemmVariant
    tile_channels: int = 0
    tile_tokens: int = 0
    cluster: int = 0
    share_weights: int = 0
    split_k: int = 0
    band: int = 0

    @cached_property
    def cut(self) -> dict[str, int]:
        """All but the variant, as arguments of its launch."""
        return {name: getattr(self, name) for name in CUT}


CUT = tuple(field.name for field in fields(Choice) if field.name != "variant")


_END = 2**31
_ANY = range(1, _END)


@dataclass(frozen=True)
class Streaming:
    """gemm_small_m, of INT8: every CTA streams its run of the weights once; x comes in passing.

    It holds for at most `max_m` tokens, and some numbers of weight tiles per SM and of input
    features. A weight tile is 16 channels; an SM's share is rounded up: 14 for 28672 channels on
    132 SMs.
    """

    max_m: int
    row_tiles: int
    reason: str
    weight_tiles: Container[int] = _ANY
    k: Container[int] = _ANY

    def holds(self, m: int, n: int, k: int, dtype: str, sms: int) -> bool:
        """Return whether the row counts for a product."""
        share = ceil_div(ceil_div(n, TILE_CHANNELS), sms)
        sized = share in self.weight_tiles and k in self.k
        return m <= self.max_m and sized and dtype == GemmSmallM.dtype

    def choice(self, dtype: str, out_dtype: str) -> Choice:
        """Return the kernel; it cuts the output by itself."""
        return Choice(GemmSmallM(out_dtype=out_dtype, max_m=self.max_m, row_tiles=self.row_tiles))


@dataclass(frozen=True)
class Tile:
    """gemm_tiled with up to this much of the output per CTA; `gemm_model` says how much of it."""

    channels: int
    tokens: int
    reason: str
    pingpong: bool = False


@dataclass(frozen=True)
class Measured:
    """What is the fastest for one size of weights on an H200, though the model says otherwise.

    Tiles side by side in channels share their tokens and, in the last round, their K: where it may
    not be split, the row does not count. With `share_weights`, tiles side by side in tokens share
    their weights, and K is whole.
    """

    dtypes: Container[str]
    n: int
    k: int
    m: range
    channels: int
    tokens: int
    reason: str
    share_weights: bool = False

    def holds(self, m: int, n: int, k: int, dtype: str, sms: int) -> bool:
        """Return whether the row counts for a product."""
        return (n, k, sms) == (self.n, self.k, H200_SMS) and m in self.m and dtype in self.dtypes

    def choice(self, dtype: str, out_dtype: str) -> Choice:
        """Return the kernel, and how it cuts the output."""
        variant = GemmTiled(
            dtype=dtype,
            out_dtype=out_dtype,
            channels=self.channels,
            tokens=self.tokens,
            fast_accum=dtype == "e4m3",
        )
        shared = {"share_weights": 1} if self.share_weights else {"split_k": 2}
        return Choice(variant, self.channels, self.tokens, cluster=2, **shared)


# Alone, at rest (docs/notebooks/gemm_tiled.md).
MEASURED = (
    Measured(("e4m3",), 4096, 14336, range(241, 257), 128, 128, "26.1 us, not 27.6"),
    Measured(
        OPERAND_DTYPES, 10240, 8192, range(961, 1025), 128, 256, "106 and 116 us, not 110, 121"
    ),
    Measured(
        *(DTYPES_16_BIT, 4096, 14336, range(241, 257), 128, 64, "51.4 us, not 53.7"),
        share_weights=True,
    ),
)

# The first row that holds counts, if it may serve the call. Of tiles the fastest by `gemm_model`
# does.
TABLE: tuple[Streaming | Measured | Tile, ...] = (
    Streaming(8, 2, "reads weights at memory speed (docs/notebooks/gemm_small_m.md)"),
    Streaming(16, 3, "whole passes of three tiles", (3,), range(4096, _END)),
    Streaming(16, 2, "reads weights at memory speed", (1, 2, 4), range(2048, _END)),
    Streaming(16, 2, "reads weights at memory speed", range(6, 14)),
    *MEASURED,
    Tile(64, 8, "FP8, 16 bits: no more columns than tokens"),
    Tile(128, 8, "FP8, 16 bits: likewise; an SM's share of larger N in one tile"),
    Tile(64, 16, "no more columns than tokens"),
    Tile(128, 16, "FP8, 16 bits: likewise; an SM's share of larger N in one tile"),
    Tile(64, 32, "no more columns than tokens; an SM's share of N <= 8192"),
    Tile(128, 32, "an SM's share of larger N in one tile"),
    Tile(64, 64, "N = 4096 has 64 of them, or 128 for 128 tokens"),
    Tile(96, 64, "N = 6144 has 64 of them"),
    Tile(128, 64, "reads less per product than 64 x 64"),
    Tile(160, 64, "N = 10240 has 64 of them"),
    Tile(64, 128, "N = 4096 and 256 tokens fill the SMs"),
    Tile(96, 128, "N = 6144 and 256 tokens fill the SMs; two rounds of N = 10240"),
    Tile(128, 128, "N = 4096 and 512 tokens fill the SMs; the largest for FP8 with fp32 sums"),
    Tile(160, 128, "N = 10240 and 256 tokens fill the SMs"),
    Tile(192, 128, "N = 6144 and 512 tokens fill the SMs"),
    Tile(224, 128, "N = 28672 has 128 of them"),
    Tile(256, 128, "the most products per byte of shared memory"),
    Tile(128, 128, "stores one tile while it multiplies another", pingpong=True),
    Tile(128, 256, "the least power: many tokens"),
)

_COMPILED = frozenset((*GEMM_SMALL_M, *GEMM_TILED))


def choose(
    m: int,
    n: int,
    k: int,
    dtype: str,
    out_dtype: str,
    *,
    packed: bool,
    fast_accum: bool = True,
    batch_invariant: bool = False,
    sms: int = H200_SMS,
) -> Choice:
    """Return the table's kernel for a product of x [m, k] and w [n, k], all of them at least 1.

    Args:
        m: tokens.
        n: output channels.
        k: input features.
        dtype: of x and w, in `gemm_variants.GEMM_DTYPES`, or `BLOCK_E4M3`: e4m3 with block scales.
        out_dtype: of `gemm_variants.out_dtypes`.
        packed: whether w is packed.
        fast_accum: whether FP8 sums may stay in the tensor cores; those of 16 bits do anyway, and
            block scales leave no choice.
        batch_invariant: whether a row's bits must not depend on m.
        sms: multiprocessors of the GPU.
    """
    for name, size in (("m", m), ("n", n), ("k", k)):
        checks.integer(name, size, least=1)
    for row in TABLE:
        if not isinstance(row, Tile) and row.holds(m, n, k, dtype, sms):
            wanted = row.choice(dtype, out_dtype)
            if serving(wanted, m, n, packed, fast_accum, batch_invariant, sms) == wanted:
                return evened(wanted, m)
    accumulates = fast_accum and dtype == "e4m3"
    wanted = _fastest(modelled_m(m), n, k, dtype, out_dtype, accumulates, batch_invariant, sms)
    choice = serving(wanted, m, n, packed, fast_accum, batch_invariant, sms)
    assert choice is not None, "a choice for more tokens serves fewer"
    return evened(choice, m)


def evened(choice: Choice, m: int) -> Choice:
    """Return a choice, made for m tokens or a few more, with tiles of as equal sizes as can be.

    As many tiles as before, so the same rounds; but few rows lie behind the last token, and no tile
    as a whole: the copy engine takes far longer over rows that there are not.
    """
    variant = choice.variant
    if isinstance(variant, GemmSmallM) or choice.tile_tokens == 0:
        return choice
    tiles = round_up(ceil_div(m, choice.tile_tokens), 2 if choice.share_weights else 1)
    # Turned results are stored by TMA in whole chunks (csrc: kChunkTokens).
    step = 1 if variant.token_rows else 32 if variant.tokens % 64 == 0 else 16
    tokens = round_up(ceil_div(m, tiles), step)
    if tokens >= choice.tile_tokens or ceil_div(m, tokens) != tiles:
        return choice
    return replace(choice, tile_tokens=tokens)


# The model is asked for these only, so that few calls wait for it: (up to m, in steps of).
_MODELLED = ((8, 8), (256, 16), (1024, 64), (4096, 256), (16384, 1024))


def modelled_m(m: int) -> int:
    """Return for how many tokens the choice for m is made: a few more, and 16384 at most.

    Up to 1024 tokens both have as many tiles of 64 and of 128.
    """
    for most, step in _MODELLED:
        if m <= most:
            return round_up(m, step)
    return _MODELLED[-1][0]


@lru_cache(maxsize=1 << 12)
def _fastest(
    m: int,
    n: int,
    k: int,
    dtype: str,
    out_dtype: str,
    fast_accum: bool,
    batch_invariant: bool,
    sms: int,
) -> Choice:
    """Return the tiled kernel that the model takes for the fastest."""
    # Floating-point sums of shared K are added in another order (`serving`).
    may_split = dtype == "int8" or not batch_invariant
    variants = _tiles(dtype, out_dtype, fast_accum)
    variant, cut = tile_cost_model.fastest(variants, m, n, k, sms, may_split=may_split)
    return Choice(variant, **cut._asdict())


@cache
def _tiles(dtype: str, out_dtype: str, fast_accum: bool) -> tuple[GemmTiled, ...]:
    """Return the table's tiled kernels of these dtypes."""
    tiles = [row for row in TABLE if isinstance(row, Tile)]
    variants = (
        GemmTiled(
            dtype="e4m3" if dtype == BLOCK_E4M3 else dtype,
            out_dtype=out_dtype,
            channels=row.channels,
            tokens=row.tokens,
            pingpong=row.pingpong,
            fast_accum=fast_accum,
            block_scales=dtype == BLOCK_E4M3,
        )
        for row in tiles
        if not (row.pingpong and dtype == BLOCK_E4M3)
    )
    return tuple(variant for variant in variants if variant in _COMPILED)


def serving(
    choice: Choice,
    m: int,
    n: int,
    packed: bool,
    fast_accum: bool,
    batch_invariant: bool,
    sms: int,
) -> Choice | None:
    """Return a choice, with K left whole if need be, if it may be used for a call of its dtypes.

    The tiled kernels of one kind of accumulation add along K in one order, unless they split K.
    Results that must not depend on m are left to those that do not, but for INT8.
    """
    variant = choice.variant
    if variant not in _COMPILED:
        return None
    if isinstance(variant, GemmSmallM):
        return choice if packed and m <= variant.max_m else None
    exact = variant.dtype == "int8"
    takes_either = variant.dtype != "e4m3" or variant.block_scales
    if not takes_either and variant.fast_accum != fast_accum:
        return None
    in_order = not exact and batch_invariant
    if choice.split_k > 1 and (in_order or not can_split(choice, m, n, sms)):
        return replace(choice, split_k=0)
    return choice


def can_split(choice: Choice, m: int, n: int, sms: int) -> bool:
    """Return whether the tiled kernel can share the last round's tiles (csrc: share_out)."""
    variant = choice.variant
    if not isinstance(variant, GemmTiled) or choice.cluster != 2 or choice.share_weights:
        return False
    columns = ceil_div(n, choice.tile_channels or variant.channels)
    groups = ceil_div(columns, 2) * ceil_div(m, choice.tile_tokens or variant.tokens)
    return tile_cost_model.splits(variant, groups, sms)


def largest_ms() -> list[int]:
    """Return for which m the choice may change with the next larger one."""
    streaming = {row.max_m for row in TABLE if isinstance(row, Streaming)}
    modelled, last = set[int](), 0
    for most, step in _MODELLED:
        modelled.update(range(round_up(last + 1, step), most + 1, step))
        last = most
    return sorted(streaming | modelled)
