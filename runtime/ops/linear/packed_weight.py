"""Weights of linear layers in the order in which the kernels read them.

The layout is that of csrc/gemm_w8a8/packed.h: tiles of 16 output channels by 64 bytes of K, each a
run of 1 KB, padded with zeros to whole tiles and to an even number of them along K. Within a row of
64 bytes the four vectors of 16 bytes are swizzled: the v-th is at v ^ (row // 2 % 4).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from ..common import checks
from ..common.sizes import ceil_div

ALIGNMENT = 16  # bytes, of packed data: TMA asks for it
TILE_CHANNELS = 16
TILE_DEPTH = 64  # bytes
_DEPTH_UNIT = 2 * TILE_DEPTH
WEIGHT_DTYPES = (*checks.QUANTIZED_DTYPES, torch.bfloat16, torch.float16)
_VECTOR = 16  # bytes


@dataclass(frozen=True, eq=False)  # one is equal to itself alone
class PackedWeight:
    """An 8- or 16-bit weight [n, k], re-laid by `pack_weight` for our kernels on CUDA.

    8-bit ones are for `w8a8_linear`, those of 16 bits for `linear`.

    It is constant: once it is packed, nothing may write to it while a launch that reads it is
    queued. That is what lets a kernel fetch it before those in front of it have ended.

    Args:
        data: [ceil(n / 16), 2 ceil(k / 128), 16, 64] int8 or float8_e4m3fn, or
            [ceil(n / 16), 2 ceil(k / 64), 16, 32] bf16 or fp16; contiguous and aligned to 16 bytes.
            All bytes beyond n and k are zero.
        n: output channels.
        k: input features.
    """

    data: torch.Tensor
    n: int
    k: int

    def __post_init__(self) -> None:
        checks.integer("n", self.n, least=1)
        checks.integer("k", self.k, least=1)
        checks.tensor("data", self.data, WEIGHT_DTYPES, ("tiles", "blocks", "rows", "depth"))
        shape = packed_shape(self.n, self.k, self.data.dtype)
        checks.tensor("data", self.data, WEIGHT_DTYPES, shape)
        if not self.data.is_contiguous():
            raise ValueError(f"data: got strides {list(self.data.stride())}, expected contiguous")
        # What torch.compile traces has no address yet.
        if not torch.compiler.is_compiling() and self.data.data_ptr() % ALIGNMENT:
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
        w: [N, K] int8, float8_e4m3fn, bf16 or fp16 with any strides.

    Raises:
        TypeError, ValueError: naming the argument.
    """
    checks.tensor("w", w, WEIGHT_DTYPES, ("N", "K"), any_strides=True)
    checks.not_empty("w", w, "N", "K")
    packed = PackedWeight(pack(w), w.size(0), w.size(1))
    if w.is_cuda:
        torch.cuda.current_stream(w.device).synchronize()
    return packed


def data_of(w: torch.Tensor | PackedWeight) -> torch.Tensor:
    """Return what an op takes of a weight: itself, or the data of a packed one."""
    return w.data if isinstance(w, PackedWeight) else w


def check_features(
    name: str,
    w: torch.Tensor | PackedWeight,
    k: int,
    dtypes: Sequence[torch.dtype],
    device: torch.device,
) -> None:
    """Check that a weight is [N, k] of one of the dtypes, on the device, packed or not.

    Raises:
        TypeError, ValueError: naming it.
    """
    if not isinstance(w, PackedWeight):
        checks.tensor(name, w, dtypes, ("N", k), device)
        return
    if w.k != k:
        raise ValueError(f"{name}: got shape {list(w.shape)}, expected [N, {k}]")
    checks.tensor(name, w.data, dtypes, w.data.shape, device)


def packed_shape(n: int, k: int, dtype: torch.dtype) -> tuple[int, int, int, int]:
    """Return the shape of the data of a weight [n, k]."""
    blocks = 2 * ceil_div(k * dtype.itemsize, _DEPTH_UNIT)
    return (ceil_div(n, TILE_CHANNELS), blocks, TILE_CHANNELS, TILE_DEPTH // dtype.itemsize)


def pack(w: torch.Tensor) -> torch.Tensor:
    """Return the data of a `PackedWeight`."""
    tiles, blocks, rows, _ = packed_shape(w.size(0), w.size(1), w.dtype)
    # Bytes: torch does not pad FP8, and all bits zero is 0.0 in every dtype.
    data = _bytes_of(w)
    padding = (0, blocks * TILE_DEPTH - data.size(1), 0, tiles * rows - data.size(0))
    padded = functional.pad(data, padding) if any(padding) else data
    tiled = padded.reshape(tiles, rows, blocks, TILE_DEPTH).transpose(1, 2)
    return _swizzle(tiled).view(w.dtype)


def unpack(data: torch.Tensor, n: int, k: int) -> torch.Tensor:
    """Return the weight [n, k] of the data of a `PackedWeight`."""
    tiled = _swizzle(data.view(torch.int8))
    tiles, blocks, rows, depth = tiled.shape
    padded = tiled.transpose(1, 2).reshape(tiles * rows, blocks * depth)
    return padded[:n, : k * data.itemsize].contiguous().view(data.dtype)


def _bytes_of(w: torch.Tensor) -> torch.Tensor:
    """Return a weight [n, k] as bytes: a view, if torch has one of it."""
    if w.itemsize > 1 and w.stride(1) != 1:
        w = w.contiguous()
    return w.view(torch.int8)


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
