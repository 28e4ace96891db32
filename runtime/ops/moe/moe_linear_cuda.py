"""Products of the rows of each expert on CUDA: from tensors to a launch of the grouped GEMM."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import ClassVar

import torch

from ...jit.loader import load
from ...jit.registry import register_family
from ...jit.sources import CSRC
from ...jit.targets import HOPPER
from ...jit.variant import FLOAT_DTYPES, OPERAND_DTYPES, Variant, check
from ..common import pdl
from ..common.device import KERNEL_NAMES, address_of, current_stream, gpu, on_device
from ..common.sizes import ceil_div
from ..linear.block_scales import SCALE_CHANNELS, scale_channels
from ..linear.gemm_operands import aligned_copy, is_aligned, row_stride
from ..linear.gemm_variants import DTYPES_16_BIT, GEMM_DTYPES, out_dtypes
from ..linear.packed_weight import TILE_CHANNELS
from ..linear.quantize_cuda import GROUP
from .packed_experts import pack, tiles_of_expert
from .plan import TILE_TOKENS, balanced_tiles

_LARGEST_STRIDE = 2**31 - 1 - 1024  # bytes (csrc: kLargestSize)
QUANTIZED_TILE = TILE_TOKENS[0]  # rows of a tile whose x a kernel can quantise
# Up to how many rows of an expert, on average, both products of a block quantise x themselves: 32
# tokens of 8 among 128 experts. Each tile of channels repeats it, so with more rows, or more of K,
# a launch of its own costs less. Measured: docs/notebooks/moe.md.
QUANTIZED_ROWS = 2
QUANTIZED_K = 2048
VECTOR = 8  # elements of x of 16 bits that are read at once


@dataclass(frozen=True, kw_only=True)
class MoeLinear(Variant):
    """Grouped GEMM of packed experts (TMA, wgmma).

    Args:
        dtype: of the operands: of w, and of x unless the kernel quantises it.
        out_dtype: of the output: for 16-bit operands their own, or fp32.
        tokens: most rows of a tile: 8, 16, 32, 64 or 128.
        block_scales: a scale for each 128 of K of a row, and of `scale_channels`, for e4m3.
        scale_channels: 8 or, with block scales, 128.
        x_dtype: bf16 or fp16: x's, which the kernel quantises to `dtype`, for tiles of 8 rows;
            empty: x has `dtype`.
    """

    family: ClassVar[str] = "moe_linear"
    source: ClassVar[Path] = CSRC / "gemm_w8a8" / "moe" / "moe_linear_sm90.cu"
    needs: ClassVar[frozenset[str]] = frozenset({HOPPER})

    dtype: str
    out_dtype: str
    tokens: int
    block_scales: bool = False
    scale_channels: int = SCALE_CHANNELS
    x_dtype: str = ""

    def __post_init__(self) -> None:
        check("dtype", self.dtype, GEMM_DTYPES)
        check("out_dtype", self.out_dtype, out_dtypes(self.dtype))
        check("tokens", self.tokens, TILE_TOKENS)
        if self.block_scales and self.dtype != "e4m3":
            raise ValueError(f"block_scales: got True with dtype {self.dtype!r}, expected 'e4m3'")
        allowed = (SCALE_CHANNELS, GROUP) if self.block_scales else (SCALE_CHANNELS,)
        check("scale_channels", self.scale_channels, allowed)
        quantizes = self.dtype in OPERAND_DTYPES and self.tokens == QUANTIZED_TILE
        check("x_dtype", self.x_dtype, ("", *DTYPES_16_BIT) if quantizes else ("",))

    @property
    def channels(self) -> int:
        """Most channels of a tile: as many as sums of its rows leave registers for."""
        # Scales of 8 channels take registers, too.
        scaled = self.block_scales and self.scale_channels == SCALE_CHANNELS
        return 128 if self.tokens < 128 or scaled else 256

    @property
    def channel_step(self) -> int:
        """What the channels of a smaller tile are a multiple of (csrc: kTileStep)."""
        if self.scale_channels == SCALE_CHANNELS or self.tokens < 64:
            return TILE_CHANNELS
        return self.channels // 2  # of a piece

    @property
    def name(self) -> str:
        tile = f"{self.channels}x{self.tokens}"
        name = f"{self.family}-{self.dtype}-{self.out_dtype}-{tile}"
        options = (
            ("block_scales", self.block_scales),
            ("128", self.scale_channels == GROUP),
            (f"of_{self.x_dtype}", bool(self.x_dtype)),
        )
        return "-".join((name, *(option for option, chosen in options if chosen)))

    def defines(self) -> dict[str, str]:
        return {
            "OSTINATO_OPERAND": self.dtype,
            "OSTINATO_OUT": self.out_dtype,
            "OSTINATO_CHANNELS": str(self.channels),
            "OSTINATO_TOKENS": str(self.tokens),
            "OSTINATO_PINGPONG": "0",
            "OSTINATO_FAST_ACCUM": str(int(self.dtype == "e4m3" and not self.block_scales)),
            "OSTINATO_BLOCK_SCALES": str(int(self.block_scales)),
            "OSTINATO_SCALE_CHANNELS": str(self.scale_channels),
            "OSTINATO_QUANTIZES": str(int(bool(self.x_dtype))),
            **({"OSTINATO_X": self.x_dtype} if self.x_dtype else {}),
        }


_SCALES_OF_8_BITS = (
    *((dtype, False, SCALE_CHANNELS) for dtype in OPERAND_DTYPES),
    *(("e4m3", True, channels) for channels in (SCALE_CHANNELS, GROUP)),
)
MOE_LINEAR = (
    *(
        MoeLinear(
            dtype=dtype,
            out_dtype=out_dtype,
            tokens=tokens,
            block_scales=block_scales,
            scale_channels=scale_channels,
        )
        for dtype, block_scales, scale_channels in (
            *_SCALES_OF_8_BITS,
            *((dtype, False, SCALE_CHANNELS) for dtype in DTYPES_16_BIT),
        )
        for tokens, out_dtype in product(TILE_TOKENS, FLOAT_DTYPES)
        if out_dtype in out_dtypes(dtype)
    ),
    # Results have the dtype of x.
    *(
        MoeLinear(
            dtype=dtype,
            out_dtype=x_dtype,
            tokens=QUANTIZED_TILE,
            block_scales=block_scales,
            scale_channels=scale_channels,
            x_dtype=x_dtype,
        )
        for dtype, block_scales, scale_channels in _SCALES_OF_8_BITS
        for x_dtype in DTYPES_16_BIT
    ),
)
register_family(MoeLinear, MOE_LINEAR)


@cache
def tile_channels(variant: MoeLinear, sms: int, tiles: int, expert_tiles: int) -> int:
    """Return how many channels of an expert a CTA multiplies at once.

    As many as are compiled, or fewer where that spreads few tiles more evenly over the SMs: what
    counts is how many weights the busiest one reads. Narrower tiles copy x more often, and begin
    more often: they must save an eighth. Tiles of the most rows wait for their MMAs, which are of
    all channels that are compiled, whatever is read.

    Args:
        variant: the kernel.
        sms: multiprocessors of the GPU.
        tiles: row tiles of a balanced routing.
        expert_tiles: tiles of 16 channels of an expert.
    """
    if variant.tokens == TILE_TOKENS[-1]:
        return variant.channels
    most, step = variant.channels // TILE_CHANNELS, variant.channel_step // TILE_CHANNELS

    def busiest(size: int) -> int:
        return ceil_div(tiles * ceil_div(expert_tiles, size), sms) * size

    best = min(range(most, most // 2 - 1, -step), key=busiest)
    return TILE_CHANNELS * (best if 8 * busiest(best) <= 7 * busiest(most) else most)


def in_pairs(tokens: int, rows: int, experts: int, k_bytes: int) -> bool:
    """Return whether pairs of CTAs share the weights of adjacent tiles of an expert.

    Tiles of the most rows wait for the L2, which a pair asks for each weight once. But a pair ends
    each tile together, and as long after the first of its CTAs as K of about 1000 bytes has saved.
    And experts whose rows are one tile share nothing.

    Args:
        tokens: most rows of a tile.
        rows: of all experts.
        experts: how many there are.
        k_bytes: of a row of x.
    """
    return tokens == TILE_TOKENS[-1] and k_bytes > 1024 and rows >= experts * tokens


def quantizes_rows(
    x: torch.Tensor, out_dtype: torch.dtype, slots: int, experts: int, tile_tokens: int
) -> bool:
    """Return whether the product quantises x of 16 or 32 bits itself.

    What this says may differ between numbers of tokens: the bits of the results do not.

    Args:
        x: [rows, K].
        out_dtype: of the results.
        slots: of the plan, padding included: what a graph is captured for.
        experts: of the plan.
        tile_tokens: of the plan.
    """
    few = slots <= QUANTIZED_ROWS * experts and tile_tokens == QUANTIZED_TILE
    fits = x.size(1) <= QUANTIZED_K and x.size(1) % VECTOR == 0
    return few and fits and KERNEL_NAMES[x.dtype] in DTYPES_16_BIT and out_dtype is x.dtype


def moe_gemm(
    x: torch.Tensor,
    w: torch.Tensor,
    x_scale: torch.Tensor | None,
    w_scale: torch.Tensor | None,
    channels: int,
    to_experts: bool,
    gated: bool,
    early: bool,
    power_of_two: bool,
    top_k: int,
    rows: torch.Tensor,
    experts: int,
    tiles: torch.Tensor,
    n_tiles: torch.Tensor,
    tile_tokens: int,
    out: torch.Tensor,
) -> None:
    """Launch the product on torch's current stream.

    The arguments are those of `ostinato.ops.moe_linear`, checked; w is plain or the data of
    `PackedExperts`, and of its `channels` those of gate and up are counted together.
    """
    device = x.get_device()
    with on_device(device):
        if w.dim() == 3:
            w, early = pack(w, gated), False
        if not is_aligned(x) or row_stride(x) * x.itemsize > _LARGEST_STRIDE:
            x = aligned_copy(x)
        if w_scale is not None and not w_scale.is_contiguous():
            w_scale, early = w_scale.contiguous(), False
        shared = 0  # channels that share a scale of a block
        if w_scale is not None and w_scale.dim() == 3:
            shared = scale_channels(w_scale[0], channels)
        quantizes = x.dtype is not w.dtype
        variant = MoeLinear(
            dtype=KERNEL_NAMES[w.dtype],
            out_dtype=KERNEL_NAMES[out.dtype],
            tokens=tile_tokens,
            block_scales=shared > 0,
            scale_channels=shared or SCALE_CHANNELS,
            x_dtype=KERNEL_NAMES[x.dtype] if quantizes else "",
        )
        _, sms = gpu(device)
        expected = balanced_tiles(rows.size(0), experts, tile_tokens)
        cut = tile_channels(variant, sms, expected, tiles_of_expert(channels, gated))
        stream = current_stream(device)
        load(variant, device=device, stream=stream).launch(
            x=x.data_ptr(),
            x_stride=row_stride(x),
            w=w.data_ptr(),
            x_scale=address_of(x_scale),
            x_scale_stride=x_scale.stride(0) if shared and x_scale is not None else 0,
            w_scale=address_of(w_scale),
            rows=rows.data_ptr(),
            tiles=tiles.data_ptr(),
            n_tiles=n_tiles.data_ptr(),
            out=out.data_ptr(),
            out_stride=out.stride(-2),
            experts=experts,
            n=channels,
            k=x.size(1),
            top_k=top_k,
            max_tiles=tiles.size(0),
            to_experts=to_experts,
            gated=gated,
            tile_channels=cut,
            pairs=in_pairs(tile_tokens, rows.size(0), experts, x.size(1) * x.itemsize),
            power_of_two=power_of_two and quantizes,
            early=early and pdl.enabled(),
            pdl=pdl.enabled(),
            stream=stream,
        )
