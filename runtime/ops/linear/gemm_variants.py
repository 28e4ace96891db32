"""The kernels of W8A8 and 16-bit products: one for few tokens, one for any number."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import ClassVar

from ...jit.registry import register_family
from ...jit.sources import CSRC
from ...jit.targets import HOPPER
from ...jit.variant import FLOAT_DTYPES, OPERAND_DTYPES, Variant, check

DTYPES_16_BIT = ("bf16", "fp16")
GEMM_DTYPES = (*OPERAND_DTYPES, *DTYPES_16_BIT)
# What tables of tiles call e4m3 operands with block scales.
BLOCK_E4M3 = "e4m3_block"


@dataclass(frozen=True, kw_only=True)
class GemmSmallM(Variant):
    """INT8 GEMM for few tokens: streams weights that were repacked at load.

    Args:
        out_dtype: of the output and the bias.
        max_m: the largest number of tokens: 8, 16, 32 or 64.
        token_warps: of the 8 warps, how many share the tokens; the others share K.
        row_tiles: tiles of 16 weight rows in one pass over K.
        x_slots: chunks of x that a warp holds in registers.
    """

    family: ClassVar[str] = "gemm_small_m"
    source: ClassVar[Path] = CSRC / "gemm_w8a8" / "small_m" / "small_m_sm90.cu"
    needs: ClassVar[frozenset[str]] = frozenset({HOPPER})
    dtype: ClassVar[str] = "int8"
    operands: ClassVar[str] = dtype

    out_dtype: str
    max_m: int
    token_warps: int = 1
    row_tiles: int = 2
    x_slots: int = 4

    def __post_init__(self) -> None:
        check("out_dtype", self.out_dtype, FLOAT_DTYPES)
        check("max_m", self.max_m, (8, 16, 32, 64))
        check("token_warps", self.token_warps, (1, 2, 4))

    @property
    def name(self) -> str:
        shape = f"w{self.token_warps}r{self.row_tiles}x{self.x_slots}"
        return f"{self.family}-{self.dtype}-{self.out_dtype}-m{self.max_m}-{shape}"

    def defines(self) -> dict[str, str]:
        return {
            "OSTINATO_OUTPUT": {"bf16": "__nv_bfloat16", "fp16": "__half", "fp32": "float"}[
                self.out_dtype
            ],
            "OSTINATO_TOKENS": str(self.max_m),
            "OSTINATO_TOKEN_WARPS": str(self.token_warps),
            "OSTINATO_ROW_TILES": str(self.row_tiles),
            "OSTINATO_X_SLOTS": str(self.x_slots),
            "OSTINATO_PAIRED_TILES": "0",
        }


@dataclass(frozen=True, kw_only=True)
class GemmTiled(Variant):
    """W8A8 or 16-bit GEMM for any number of tokens: TMA, wgmma and a persistent grid.

    Args:
        dtype: of x and w, int8, e4m3, bf16 or fp16.
        out_dtype: of the output and the bias; with 16-bit operands their own, or fp32.
        channels: most channels of a CTA's tile: a multiple of 32 up to 256 where `token_rows`,
            otherwise 64 or 128.
        tokens: most tokens of a tile: 8, 16, 32, 64, 128 or 256.
        pingpong: two warpgroups take turns, one multiplies a tile while the other stores one.
        fast_accum: e4m3 sums stay in the tensor cores; otherwise they are added in fp32 every 128
            products.
        block_scales: a scale for each 128 of K of a token, and of `scale_channels`: e4m3 sums of
            128 products are scaled and added in fp32.
        scale_channels: 8 or, with block scales, 128.
    """

    family: ClassVar[str] = "gemm_tiled"
    source: ClassVar[Path] = CSRC / "gemm_w8a8" / "tiled" / "tiled_sm90.cu"
    needs: ClassVar[frozenset[str]] = frozenset({HOPPER})

    dtype: str
    out_dtype: str
    channels: int
    tokens: int
    pingpong: bool = False
    fast_accum: bool = False
    block_scales: bool = False
    scale_channels: int = 8

    def __post_init__(self) -> None:
        check("dtype", self.dtype, GEMM_DTYPES)
        check("out_dtype", self.out_dtype, out_dtypes(self.dtype))
        check("tokens", self.tokens, (8, 16, 32, 64, 128, 256))
        check(
            "channels", self.channels, tuple(range(64, 257, 32)) if self.token_rows else (64, 128)
        )
        if self.fast_accum and self.dtype != "e4m3":
            raise ValueError(f"fast_accum: got True with dtype {self.dtype!r}, expected 'e4m3'")
        if self.block_scales and (self.dtype != "e4m3" or self.fast_accum or self.pingpong):
            raise ValueError(
                f"block_scales: got True with dtype {self.dtype!r}, fast_accum {self.fast_accum} "
                f"and pingpong {self.pingpong}, expected 'e4m3', False and False"
            )
        check("scale_channels", self.scale_channels, (8, 128) if self.block_scales else (8,))

    @property
    def operands(self) -> str:
        """What tables of tiles call x and w."""
        return BLOCK_E4M3 if self.block_scales else self.dtype

    @property
    def token_rows(self) -> bool:
        """Whether tokens feed the rows of the MMA and channels its columns (csrc: kTokenRows)."""
        return self.tokens in (64, 128) and not self.pingpong

    @property
    def operand_bytes(self) -> int:
        """Bytes of an element of x and w (csrc: kOperandBytes)."""
        return 2 if self.dtype in DTYPES_16_BIT else 1

    @property
    def stage_depth(self) -> int:
        """How many bytes of K a stage of the ring holds (csrc: kStageDepth)."""
        size = self.channels + self.tokens
        return 512 if size <= 80 else 256 if size <= 160 else 128

    @property
    def finds_argmax(self) -> bool:
        """Whether it can hand over the best of each part of a row (csrc: kFindsArgmax)."""
        return self.out_dtype == "fp32" and self.tokens > 16 and not self.pingpong

    def argmax_parts(self, n: int, tile_channels: int = 0) -> int:
        """Return in how many parts a row of n results is (csrc: slices_of_tile).

        `tile_channels` is how many of the compiled ones a tile has; 0 for all.
        """
        channels = tile_channels or self.channels
        return -(-n // channels) * (2 if self.token_rows else -(-channels // 64))

    @property
    def name(self) -> str:
        name = f"{self.family}-{self.dtype}-{self.out_dtype}-{self.channels}x{self.tokens}"
        options = (
            ("pingpong", self.pingpong),
            ("fast_accum", self.fast_accum),
            ("block_scales", self.block_scales),
            ("128", self.scale_channels == 128),
        )
        return "-".join((name, *(option for option, chosen in options if chosen)))

    def defines(self) -> dict[str, str]:
        return {
            "OSTINATO_OPERAND": self.dtype,
            "OSTINATO_OUT": self.out_dtype,
            "OSTINATO_CHANNELS": str(self.channels),
            "OSTINATO_TOKENS": str(self.tokens),
            "OSTINATO_PINGPONG": str(int(self.pingpong)),
            "OSTINATO_FAST_ACCUM": str(int(self.fast_accum)),
            "OSTINATO_BLOCK_SCALES": str(int(self.block_scales)),
            "OSTINATO_SCALE_CHANNELS": str(self.scale_channels),
        }


@cache
def sharing(variant: GemmSmallM | GemmTiled, scale_channels: int) -> GemmTiled:
    """Return a kernel with block scales as the one whose scales are of so many channels."""
    assert isinstance(variant, GemmTiled), "block scales are for the tiled kernel"
    return replace(variant, scale_channels=scale_channels)


def out_dtypes(dtype: str) -> tuple[str, ...]:
    """Return in which dtypes a product of operands of a dtype can be written."""
    return (dtype, "fp32") if dtype in DTYPES_16_BIT else FLOAT_DTYPES


# (max_m, token_warps, row_tiles, x_slots): those of docs/notebooks/gemm_small_m.md. Three row tiles
# suit weights of three tiles per SM. Beyond 16 tokens the tiled GEMM wins, and in FP8 always.
_SMALL_M = ((8, 1, 2, 4), (16, 1, 2, 4), (16, 1, 3, 4))
GEMM_SMALL_M = tuple(
    GemmSmallM(
        out_dtype=out_dtype,
        max_m=max_m,
        token_warps=token_warps,
        row_tiles=row_tiles,
        x_slots=x_slots,
    )
    for max_m, token_warps, row_tiles, x_slots in _SMALL_M
    for out_dtype in FLOAT_DTYPES
)
register_family(GemmSmallM, GEMM_SMALL_M)
# (channels, tokens, pingpong): those of docs/notebooks/gemm_tiled.md.
_TILES = (
    *((64, 16, False), (64, 32, False), (128, 32, False)),
    *((channels, 64, False) for channels in (64, 96, 128, 160)),
    *((channels, 128, False) for channels in (64, 96, 128, 160, 192, 224, 256)),
    *((128, 256, False), (128, 128, True)),
)
# For few tokens in FP8 and 16 bits: INT8 has gemm_small_m for them.
_FEW_FP8_TILES = ((64, 8, False), (128, 8, False), (128, 16, False))
# fp32 sums beside those of the tensor cores: half the tile fits in the registers.
_EXACT_FP8_TILES = ((64, 16, False), (64, 64, False), (128, 128, False))
# With block scales: channels and tokens as above, no more than fits beside the sums of a stage.
_BLOCK_TILES = (
    *((64, 8, False), (128, 8, False), (64, 16, False), (128, 16, False)),
    *((64, 32, False), (128, 32, False)),
    *((channels, 64, False) for channels in (64, 96, 128, 160)),
    *((channels, 128, False) for channels in (64, 96, 128, 160, 192, 224, 256)),
)
GEMM_TILED = tuple(
    GemmTiled(
        dtype=dtype,
        out_dtype=out_dtype,
        channels=channels,
        tokens=tokens,
        pingpong=pingpong,
        fast_accum=fast_accum,
        block_scales=block_scales,
    )
    for dtype, fast_accum, block_scales, tiles in (
        ("int8", False, False, _TILES),
        ("e4m3", True, False, (*_FEW_FP8_TILES, *_TILES)),
        ("e4m3", False, False, _EXACT_FP8_TILES),
        ("e4m3", False, True, _BLOCK_TILES),
    )
    for (channels, tokens, pingpong), out_dtype in product(tiles, FLOAT_DTYPES)
    # The epilogue's fp32 rows do not fit in the registers beside the sums of the largest tile.
    if (tokens, out_dtype) != (256, "fp32")
)
GEMM_TILED += tuple(
    GemmTiled(dtype=dtype, out_dtype=out_dtype, channels=channels, tokens=tokens, pingpong=pingpong)
    for dtype in DTYPES_16_BIT
    for channels, tokens, pingpong in (*_FEW_FP8_TILES, *_TILES)
    for out_dtype in out_dtypes(dtype)
    if (tokens, out_dtype) != (256, "fp32")
)
# Tables of tiles have those of 8 channels, for both.
GEMM_TILED += tuple(replace(v, scale_channels=128) for v in GEMM_TILED if v.block_scales)
register_family(GemmTiled, GEMM_TILED)
