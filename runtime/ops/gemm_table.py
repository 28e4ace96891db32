"""Which kernel multiplies W8A8 matrices of which sizes: one table, with a reason beside each row.

The table is data; `choose` reads it. What `python -m ostinato tune` measured on a machine goes
before it: see `ostinato.ops.gemm_tuning`.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, fields
from functools import cached_property

from ostinato.kernels.catalogue import GEMM_SMALL_M, GEMM_TILED
from ostinato.kernels.variants import GemmSmallM, GemmTiled
from ostinato.ops import checks
from ostinato.ops.packing import TILE_CHANNELS

GemmVariant = GemmSmallM | GemmTiled

H200_SMS = 132
ORDERED_TOKENS = 64  # tiles compiled for fewer add along K in two chains
SPLIT_TOKENS = 32  # those for fewer cannot split K
HALF_SM_CHANNELS, HALF_SM_TOKENS = 64, 128  # the largest of which two fit on an SM


@dataclass(frozen=True)
class Choice:
    """A kernel and how it cuts the output; a number that is 0 is left to the kernel's launch.

    Args:
        variant: the kernel.
        tile_channels: channels of a tile, a multiple of 16, at most those compiled.
        tile_tokens: tokens of a tile, at most those compiled.
        cluster: CTAs that share their tokens: 1 or 2.
        split_k: CTAs that share K of a tile: 1 or, without a cluster and where all tiles are
            computed at once, 2.
        ctas_per_sm: 2 for CTAs of half the shared memory, so that a successor starts beside them:
            tiles compiled for 64 channels and at most 128 tokens.
        band: tiles of channels that are walked side by side.
    """

    variant: GemmVariant
    tile_channels: int = 0
    tile_tokens: int = 0
    cluster: int = 0
    split_k: int = 0
    ctas_per_sm: int = 0
    band: int = 0

    @cached_property
    def cut(self) -> dict[str, int]:
        """All but the variant, as arguments of its launch."""
        return {name: getattr(self, name) for name in CUT}


CUT = tuple(field.name for field in fields(Choice) if field.name != "variant")


@dataclass(frozen=True)
class Streaming:
    """gemm_small_m: every CTA streams its run of the weights once; x comes in passing."""

    max_m: int
    row_tiles: int

    def choice(
        self, m: int, n: int, dtype: str, out_dtype: str, fast_accum: bool, sms: int
    ) -> Choice:
        # Its FP8 sums are fp32 in any case: it serves both kinds of accumulation.
        return Choice(
            GemmSmallM(dtype=dtype, out_dtype=out_dtype, max_m=self.max_m, row_tiles=self.row_tiles)
        )


@dataclass(frozen=True)
class Tile:
    """gemm_tiled with this much of the output per CTA; the rest is as of `Choice`.

    `even` gives all CTAs tiles of the same number of channels, as many as fit into the fewest
    rounds: right where reading the weights takes the time. Where multiplying does, a part of a
    tile costs as much as the whole, and tiles stay whole.
    """

    channels: int
    tokens: int
    cluster: int = 0
    split_k: int = 0
    ctas_per_sm: int = 0
    band: int = 0
    even: bool = True

    def choice(
        self, m: int, n: int, dtype: str, out_dtype: str, fast_accum: bool, sms: int
    ) -> Choice:
        variant = GemmTiled(
            dtype=dtype,
            out_dtype=out_dtype,
            channels=self.channels,
            tokens=self.tokens,
            fast_accum=fast_accum and dtype == "e4m3",
        )
        cut = (self.cluster, self.split_k, self.ctas_per_sm, self.band)
        return Choice(variant, self._even_channels(m, n, sms) if self.even else 0, 0, *cut)

    def _even_channels(self, m: int, n: int, sms: int) -> int:
        units = _ceil_div(n, TILE_CHANNELS)
        token_tiles = _ceil_div(m, self.tokens)
        tiles = token_tiles * _ceil_div(units, self.channels // TILE_CHANNELS)
        at_once = sms // max(1, self.split_k)
        columns = _ceil_div(tiles, at_once) * at_once // token_tiles
        return TILE_CHANNELS * _ceil_div(units, columns)


_ANY = range(1, 2**31)


@dataclass(frozen=True)
class Row:
    """A kernel for at most `m_max` tokens and some numbers of weight tiles per SM.

    A weight tile is 16 channels; an SM's share is rounded up: 14 for 28672 channels on 132 SMs.
    """

    m_max: int
    kernel: Streaming | Tile
    reason: str
    weight_tiles: Container[int] = _ANY


_LARGEST = 2**31 - 1

# The first row counts whose sizes fit and whose kernel may serve the call (`serves`).
TABLE = (
    Row(8, Streaming(8, 3), "whole passes of three tiles", weight_tiles=(3, 5)),
    Row(8, Streaming(8, 2), "reads weights at memory speed (docs/gemm_small_m.md)"),
    Row(16, Streaming(16, 3), "whole passes of three tiles", weight_tiles=(3, 5)),
    Row(16, Streaming(16, 2), "reads weights at memory speed (docs/gemm_small_m.md)"),
    Row(16, Tile(128, 16), "an SM's share in one tile, or in fewer", weight_tiles=range(5, 2**31)),
    Row(16, Tile(64, 16), "an SM's share in one tile"),
    Row(32, Tile(128, 32), "an SM's share in one tile, or in fewer", weight_tiles=range(5, 2**31)),
    Row(32, Tile(64, 32), "an SM's share in one tile"),
    Row(64, Tile(256, 64), "x is read by fewer tiles", weight_tiles=range(9, 2**31)),
    Row(64, Tile(128, 64), "an SM's share in one tile", weight_tiles=range(5, 9)),
    Row(64, Tile(64, 64), "an SM's share in one tile"),
    Row(96, Tile(256, 96), "x is read by fewer tiles", weight_tiles=range(9, 2**31)),
    Row(96, Tile(128, 96), "an SM's share in one tile"),
    Row(128, Tile(128, 128), "an SM's share in one tile"),
    Row(160, Tile(128, 160), "weights are read once"),
    Row(192, Tile(128, 192), "weights are read once"),
    Row(224, Tile(128, 224), "weights are read once"),
    Row(256, Tile(128, 256), "weights are read once"),
    Row(
        512,
        Tile(128, 128),
        "4096 channels: 128 tiles for 132 SMs, where tiles of 256 tokens leave half of them idle",
        weight_tiles=range(1, 3),
    ),
    Row(_LARGEST, Tile(128, 256, even=False), "the most products per byte of shared memory"),
    Row(_LARGEST, Tile(128, 128), "FP8 with fp32 sums: the largest tile that is compiled"),
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
        dtype: of x and w, "int8" or "e4m3".
        out_dtype: "bf16", "fp16" or "fp32".
        packed: whether w is packed.
        fast_accum: whether FP8 sums may stay in the tensor cores.
        batch_invariant: whether a row's bits must not depend on m.
        sms: multiprocessors of the GPU.
    """
    for name, size in (("m", m), ("n", n), ("k", k)):
        checks.integer(name, size, least=1)
    weight_tiles = _ceil_div(_ceil_div(n, TILE_CHANNELS), sms)
    for row in TABLE:
        if m > row.m_max or weight_tiles not in row.weight_tiles:
            continue
        choice = row.kernel.choice(m, n, dtype, out_dtype, fast_accum, sms)
        if serves(choice, m, n, packed, fast_accum, batch_invariant, sms):
            return choice
    raise AssertionError("the last rows serve every call")


def serves(
    choice: Choice,
    m: int,
    n: int,
    packed: bool,
    fast_accum: bool,
    batch_invariant: bool,
    sms: int,
) -> bool:
    """Return whether a choice may be used for a call of its dtypes.

    The tiled kernels of one kind of accumulation for tiles of 64 tokens and more add along K in one
    order, unless they split K; all others add in orders of their own. FP8 results that must not
    depend on m are left to those.
    """
    variant = choice.variant
    if variant not in _COMPILED:
        return False
    any_order = variant.dtype == "int8" or not batch_invariant
    if isinstance(variant, GemmSmallM):
        return packed and m <= variant.max_m and any_order
    if choice.split_k > 1:
        tokens = choice.tile_tokens or variant.tokens
        channels = choice.tile_channels or variant.channels
        tiles = _ceil_div(m, tokens) * _ceil_div(n, channels)
        if variant.tokens < SPLIT_TOKENS or tiles * choice.split_k > sms or not any_order:
            return False
    in_order = variant.tokens >= ORDERED_TOKENS
    return (any_order or in_order) and (variant.dtype == "int8" or variant.fast_accum == fast_accum)


def largest_ms() -> list[int]:
    """Return for which m the choice may change with the next larger one."""
    return sorted({row.m_max for row in TABLE})


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)
