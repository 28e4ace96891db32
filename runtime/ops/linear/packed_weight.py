"""Weights of W8A8 layers in the order in which the kernels read them.

The layout is that of csrc/gemm_w8a8/packed.h: tiles of 16 output channels by 64 of K, each a run of
1 KB, padded with zeros to whole tiles and to an even number of them along K. Within a row of 64 the
four vectors of 16 bytes are swizzled: the v-th is at v ^ (row // 2 % 4).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from ..common import checks
from ..common.sizes import ceil_div

ALIGNMENT = 16  # bytes, of packed data: TMA asks for it
TILE_CHANNELS = 16
TILE_DEPTH = 64
_DEPTH_UNIT = 2 * TILE_DEPTH
_VECTOR = 16  # bytes


@dataclass(frozen=True)
class PackedWeight:
    """An 8-bit weight [n, k], re-laid by `pack_weight` for `w8a8_linear` on CUDA.

    It is constant: once it is packed, nothing may write to it while a launch that reads it is
    queued. That is what lets a kernel fetch it before those in front of it have ended.

    Args:
        data: [ceil(n / 16), 2 ceil(k / 128), 16, 64] int8 or float8_e4m3fn, contiguous and aligned
            to 16 bytes. All bytes beyond n and k are zero.
        n: output channels.
        k: input features.
    """

    data: torch.Tensor
    n: int
    k: int

    def __post_init__(self) -> None:
        checks.integer("n", self.n, least=1)
        checks.integer("k", self.k, least=1)
        shape = packed_shape(self.n, self.k)
        checks.tensor("data", self.data, checks.QUANTIZED_DTYPES, shape)
        if not self.data.is_contiguous():
            raise ValueError(f"data: got strides {list(self.data.stride())}, expected contiguous")
        if self.data.data_ptr() % ALIGNMENT:
            raise ValueError(f"data: got a tensor not aligned to {ALIGNMENT} bytes")

    @property
    def dtype(self) -> torch.dtype:
        return self.data.dtype

    @property
    def device(self) -> torch.device:
        return self.data.device

    @property
    def shape(self) -> torch.Size:
        """[n, k], as of the weight that was packed."""
        return torch.Size((self.n, self.k))

    def unpack(self) -> torch.Tensor:
        """Return a copy in rows, [n, k]."""
        return unpack(self.data, self.n, self.k)


def pack_weight(w: torch.Tensor) -> PackedWeight:
    """Copy a weight into the layout of `PackedWeight`, on its own device.

    On CUDA it returns when the copy is complete: from then on launches on any stream may read it,
    and ahead of time. It cannot be captured.

    Args:
        w: [N, K] int8 or float8_e4m3fn with any strides.

    Raises:
        TypeError, ValueError: naming the argument.
    """
    checks.tensor("w", w, checks.QUANTIZED_DTYPES, ("N", "K"), any_strides=True)
    checks.not_empty("w", w, "N", "K")
    packed = PackedWeight(pack(w), w.size(0), w.size(1))
    if w.is_cuda:
        torch.cuda.current_stream(w.device).synchronize()
    return packed


def packed_shape(n: int, k: int) -> tuple[int, int, int, int]:
    """Return the shape of the data of a weight [n, k]."""
    return (ceil_div(n, TILE_CHANNELS), 2 * ceil_div(k, _DEPTH_UNIT), TILE_CHANNELS, TILE_DEPTH)


def pack(w: torch.Tensor) -> torch.Tensor:
    """Return the data of a `PackedWeight`."""
    tiles, blocks, rows, depth = packed_shape(*w.shape)
    # Bytes: torch does not pad FP8, and all bits zero is 0.0 in e4m3.
    padding = (0, blocks * depth - w.size(1), 0, tiles * rows - w.size(0))
    padded = functional.pad(w.view(torch.int8), padding) if any(padding) else w.view(torch.int8)
    tiled = padded.reshape(tiles, rows, blocks, depth).transpose(1, 2)
    return _swizzle(tiled).view(w.dtype)


def unpack(data: torch.Tensor, n: int, k: int) -> torch.Tensor:
    """Return the weight [n, k] of the data of a `PackedWeight`."""
    tiles, blocks, rows, depth = data.shape
    tiled = _swizzle(data.view(torch.int8))
    padded = tiled.transpose(1, 2).reshape(tiles * rows, blocks * depth)
    return padded[:n, :k].contiguous().view(data.dtype)


def _swizzle(tiled: torch.Tensor) -> torch.Tensor:
    """Return a contiguous copy with the vectors of each row in the order of csrc's packed.h.

    It is its own inverse.
    """
    tiles, blocks, rows, depth = tiled.shape
    row = torch.arange(rows, device=tiled.device).unsqueeze(1)
    vector = torch.arange(depth // _VECTOR, device=tiled.device)
    vectors = tiled.reshape(tiles, blocks, rows, depth // _VECTOR, _VECTOR)
    return vectors[:, :, row, vector ^ (row // 2 % 4)].view(tiles, blocks, rows, depth)


def channel_sums(w: torch.Tensor, n: int) -> torch.Tensor:
    """Return the sums over K [n] int32 of an int8 weight, [n, k] or the data of a packed one."""
    if w.dim() == 2:
        return w.sum(1, dtype=torch.int32)
    return w.sum((1, 3), dtype=torch.int32).flatten()[:n]
