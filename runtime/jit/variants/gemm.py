"""W8A8 products."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from ..sources import CSRC
from .base import (
    FLOAT_DTYPES,
    OPERAND_DTYPES,
    Variant,
    check,
)
from .rows import Quantize


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
    dtype: ClassVar[str] = "int8"

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
        }


@dataclass(frozen=True, kw_only=True)
class GemmTiled(Variant):
    """W8A8 GEMM for any number of tokens: TMA, wgmma and a persistent grid.

    Args:
        dtype: of x and w, int8 or e4m3.
        out_dtype: of the output and the bias.
        channels: most channels of a CTA's tile: a multiple of 32 up to 256 where `token_rows`,
            otherwise 64 or 128.
        tokens: most tokens of a tile: 8, 16, 32, 64, 128 or 256.
        pingpong: two warpgroups take turns, one multiplies a tile while the other stores one.
        fast_accum: e4m3 sums stay in the tensor cores; otherwise they are added in fp32 every 128
            products.
    """

    family: ClassVar[str] = "gemm_tiled"
    source: ClassVar[Path] = CSRC / "gemm_w8a8" / "tiled" / "tiled_sm90.cu"

    dtype: str
    out_dtype: str
    channels: int
    tokens: int
    pingpong: bool = False
    fast_accum: bool = False

    def __post_init__(self) -> None:
        check("dtype", self.dtype, OPERAND_DTYPES)
        check("out_dtype", self.out_dtype, FLOAT_DTYPES)
        check("tokens", self.tokens, (8, 16, 32, 64, 128, 256))
        check(
            "channels", self.channels, tuple(range(64, 257, 32)) if self.token_rows else (64, 128)
        )
        if self.fast_accum and self.dtype != "e4m3":
            raise ValueError(f"fast_accum: got True with dtype {self.dtype!r}, expected 'e4m3'")

    @property
    def token_rows(self) -> bool:
        """Whether tokens feed the rows of the MMA and channels its columns (csrc: kTokenRows)."""
        return self.tokens in (64, 128) and not self.pingpong

    @property
    def stage_depth(self) -> int:
        """How much of K a stage of the ring holds (csrc: kStageDepth)."""
        size = self.channels + self.tokens
        return 512 if size <= 80 else 256 if size <= 160 else 128

    @property
    def finds_best(self) -> bool:
        """Whether it can hand over the best of each part of a row (csrc: kFindsArgmax)."""
        return self.out_dtype == "fp32" and self.tokens > 16 and not self.pingpong

    def best_parts(self, n: int, tile_channels: int = 0) -> int:
        """Return in how many parts a row of n results is (csrc: parts_of_tile).

        `tile_channels` is how many of the compiled ones a tile has; 0 for all.
        """
        channels = tile_channels or self.channels
        return -(-n // channels) * (2 if self.token_rows else -(-channels // 64))

    @property
    def name(self) -> str:
        name = f"{self.family}-{self.dtype}-{self.out_dtype}-{self.channels}x{self.tokens}"
        options = (("pingpong", self.pingpong), ("fast_accum", self.fast_accum))
        return "-".join((name, *(option for option, chosen in options if chosen)))

    def defines(self) -> dict[str, str]:
        return {
            "OSTINATO_OPERAND": self.dtype,
            "OSTINATO_OUT": self.out_dtype,
            "OSTINATO_CHANNELS": str(self.channels),
            "OSTINATO_TOKENS": str(self.tokens),
            "OSTINATO_PINGPONG": str(int(self.pingpong)),
            "OSTINATO_FAST_ACCUM": str(int(self.fast_accum)),
        }


@dataclass(frozen=True, kw_only=True)
class FusedLinear(Variant):
    """INT8 linear layer for one token that quantises its activations itself.

    Args:
        kind: per_token (x as it is) or rms_norm (with a residual added before, if given).
        in_dtype: of x, the residual and the norm's weight: bf16 or fp16.
        out_dtype: of the output and the bias.
        max_k: the most input features, 4096 or 8192.
    """

    family: ClassVar[str] = "fused_linear"
    source: ClassVar[Path] = CSRC / "gemm_w8a8" / "fused" / "fused_linear_sm90.cu"
    dtype: ClassVar[str] = "int8"

    kind: str
    in_dtype: str
    out_dtype: str
    max_k: int

    def __post_init__(self) -> None:
        check("kind", self.kind, ("per_token", "rms_norm"))
        check("in_dtype", self.in_dtype, ("bf16", "fp16"))
        check("out_dtype", self.out_dtype, FLOAT_DTYPES)
        check("max_k", self.max_k, (4096, 8192))

    @property
    def name(self) -> str:
        dtypes = f"{self.in_dtype}-{self.dtype}-{self.out_dtype}"
        return f"{self.family}-{self.kind}-{dtypes}-k{self.max_k}"

    def defines(self) -> dict[str, str]:
        product = GemmSmallM(out_dtype=self.out_dtype, max_m=8)
        rows = Quantize(kind=self.kind, in_dtype=self.in_dtype, out_dtype=self.dtype)
        return {**product.defines(), **rows.defines(), "OSTINATO_MAX_K": str(self.max_k)}
