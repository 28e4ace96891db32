"""Which kernel multiplies W8A8 matrices of which sizes: one table, with a reason beside each row.

The table is data; `choose` reads it. What `python -m ostinato tune` measured on a machine goes
before it: see `ostinato.ops.gemm_tuning`.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, fields, replace
from functools import cached_property

from ostinato.kernels.catalogue import GEMM_SMALL_M, GEMM_TILED
from ostinato.kernels.variants import OPERAND_DTYPES, GemmSmallM, GemmTiled
from ostinato.ops import checks
from ostinato.ops.packing import TILE_CHANNELS
from ostinato.ops.sizes import ceil_div

GemmVariant = GemmSmallM | GemmTiled

H200_SMS = 132
ORDERED_TOKENS = 64  # tiles compiled for fewer add along K in two chains
SPLIT_TOKENS = 32  # those for fewer cannot split K


@dataclass(frozen=True)
class Choice:
    """A kernel and how it cuts the output; a number that is 0 is left to the kernel's launch.

    Args:
        variant: the kernel.
        tile_channels: channels of a tile, a multiple of 16, at most those compiled.
        tile_tokens: tokens of a tile, at most those compiled.
        cluster: CTAs that share their tokens: 1 or 2.
        split_k: 2: the CTAs of a cluster share K of the last round's tiles, where these would leave
            half of the SMs idle (`can_split`).
        band: tiles of channels that are walked side by side.
    """

    variant: GemmVariant
    tile_channels: int = 0
    tile_tokens: int = 0
    cluster: int = 0
    split_k: int = 0
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
    tile costs as much as the whole, and tiles stay whole. `cluster` and `split_k` count where the
    sizes let them.
    """

    channels: int
    tokens: int
    cluster: int = 0
    split_k: int = 0
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
        channels = self._even_channels(m, n, sms) if self.even else 0
        # The second CTA of a cluster needs channels of its own.
        cluster = self.cluster if n > (channels or self.channels) and sms > 1 else 0
        return Choice(variant, channels, 0, cluster, self.split_k if cluster else 0, self.band)

    def _even_channels(self, m: int, n: int, sms: int) -> int:
        units, cluster = ceil_div(n, TILE_CHANNELS), max(1, min(self.cluster, sms))
        columns = ceil_div(ceil_div(units, self.channels // TILE_CHANNELS), cluster)
        token_tiles, at_once = ceil_div(m, self.tokens), sms // cluster
        rounds = ceil_div(token_tiles * columns, at_once)
        return TILE_CHANNELS * ceil_div(units, rounds * at_once // token_tiles * cluster)


_ANY = range(1, 2**31)


@dataclass(frozen=True)
class Row:
    """A kernel for at most `m_max` tokens, some numbers of weight tiles per SM and some dtypes.

    A weight tile is 16 channels; an SM's share is rounded up: 14 for 28672 channels on 132 SMs.
    """

    m_max: int
    kernel: Streaming | Tile
    reason: str
    weight_tiles: Container[int] = _ANY
    dtypes: Container[str] = OPERAND_DTYPES


_LARGEST = 2**31 - 1
_TO_64 = range(1, 5)  # an SM's share is at most 64 channels
_OVER_64 = range(5, 2**31)
_TO_128 = range(5, 9)
_TO_256 = range(5, 17)


def _whole(channels: int, tokens: int) -> Tile:
    """Return whole tiles in clusters of two CTAs, which share K where that keeps SMs busy."""
    return Tile(channels, tokens, cluster=2, split_k=2, even=False)


# The first row counts whose sizes fit and whose kernel may serve the call (`serving`).
TABLE = (
    Row(8, Streaming(8, 3), "whole passes of three tiles", weight_tiles=(3, 5), dtypes=("e4m3",)),
    Row(8, Streaming(8, 2), "reads weights at memory speed (docs/gemm_small_m.md)"),
    Row(16, Streaming(16, 3), "whole passes of three tiles", weight_tiles=(3, 5)),
    Row(16, Streaming(16, 2), "reads weights at memory speed (docs/gemm_small_m.md)"),
    Row(16, Tile(128, 16), "an SM's share in one tile, or in fewer", weight_tiles=_OVER_64),
    Row(16, Tile(64, 16), "an SM's share in one tile"),
    Row(32, _whole(64, 32), "K is shared where half of the SMs would idle", weight_tiles=_TO_64),
    Row(32, Tile(128, 32, cluster=2), "an SM's share in one tile", weight_tiles=_TO_256),
    Row(32, _whole(64, 32), "many rounds: small tiles waste the least of the last one"),
    Row(64, _whole(64, 64), "K is shared where half of the SMs would idle", weight_tiles=_TO_64),
    Row(64, Tile(128, 64, cluster=2), "an SM's share in one tile", weight_tiles=_TO_128),
    Row(64, Tile(256, 64, cluster=2), "an SM's share in one tile", weight_tiles=_TO_256),
    Row(64, _whole(64, 64), "many rounds: small tiles waste the least of the last one"),
    Row(128, _whole(64, 128), "96 tiles for 132 SMs", weight_tiles=(3,)),
    Row(128, _whole(128, 128), "half as many tiles as SMs share K", weight_tiles=_TO_64),
    Row(128, Tile(128, 128, cluster=2), "all SMs have as much to read"),
    Row(256, _whole(64, 128), "128 tiles for 132 SMs", weight_tiles=(1, 2)),
    Row(256, _whole(128, 128), "96 tiles for 132 SMs", weight_tiles=(3,)),
    Row(_LARGEST, _whole(128, 256), "the most products per byte of shared memory"),
    Row(_LARGEST, _whole(128, 224), "fp32 outputs: the largest tile that is compiled"),
    Row(_LARGEST, Tile(128, 128, cluster=2), "FP8 with fp32 sums: the largest that is compiled"),
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
    weight_tiles = ceil_div(ceil_div(n, TILE_CHANNELS), sms)
    for row in TABLE:
        if m > row.m_max or weight_tiles not in row.weight_tiles or dtype not in row.dtypes:
            continue
        wanted = row.kernel.choice(m, n, dtype, out_dtype, fast_accum, sms)
        choice = serving(wanted, m, n, packed, fast_accum, batch_invariant, sms)
        if choice is not None:
            return choice
    raise AssertionError("the last rows serve every call")


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

    The tiled kernels of one kind of accumulation for tiles of 64 tokens and more add along K in one
    order, unless they split K; all others add in orders of their own. FP8 results that must not
    depend on m are left to those.
    """
    variant = choice.variant
    if variant not in _COMPILED:
        return None
    exact = variant.dtype == "int8"
    if isinstance(variant, GemmSmallM):
        return choice if packed and m <= variant.max_m and (exact or not batch_invariant) else None
    if not exact and variant.fast_accum != fast_accum:
        return None
    in_order = not exact and batch_invariant
    if in_order and variant.tokens < ORDERED_TOKENS:
        return None
    if choice.split_k > 1 and (in_order or not can_split(choice, m, n, sms)):
        return replace(choice, split_k=0)
    return choice


def can_split(choice: Choice, m: int, n: int, sms: int) -> bool:
    """Return whether the tiled kernel can share the last round's tiles (csrc: share_out)."""
    if not isinstance(choice.variant, GemmTiled):
        return False
    columns = ceil_div(n, choice.tile_channels or choice.variant.channels)
    groups = ceil_div(columns, 2) * ceil_div(m, choice.tile_tokens or choice.variant.tokens)
    at_once = sms // 2
    enough = choice.variant.tokens >= SPLIT_TOKENS and at_once > 0
    return choice.cluster == 2 and enough and 2 * (groups % at_once) <= at_once


def largest_ms() -> list[int]:
    """Return for which m the choice may change with the next larger one."""
    return sorted({row.m_max for row in TABLE})
