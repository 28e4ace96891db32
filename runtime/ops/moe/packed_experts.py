"""Weights of experts in the order in which the kernels read them.

Each expert's weight [N, K] is laid out as a `PackedWeight` is, one expert behind another. Of gated
weights, which are [gate | up], each tile of 16 rows has 8 channels of the gate and the same 8 of
up, so that one thread of a kernel has both.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from ..common import checks
from ..common.sizes import ceil_div, round_up
from ..linear import packed_weight
from ..linear.packed_weight import ALIGNMENT, TILE_CHANNELS, WEIGHT_DTYPES

GATE_CHANNELS = TILE_CHANNELS // 2  # channels of the gate in a tile


@dataclass(frozen=True, eq=False)  # one is equal to itself alone
class PackedExperts:
    """The weights [experts, n, k] of a layer's experts, re-laid by `pack_experts` for `moe_linear`.

    It is constant: once it is packed, nothing may write to it while a launch that reads it is
    queued.

    Args:
        data: [experts · tiles, blocks, 16, depth], where tiles, blocks and depth are those of a
            `PackedWeight` [n, k], but that a gated one has ceil(n / 2 / 8) tiles; contiguous and
            aligned to 16 bytes. All bytes beyond n and k are zero.
        experts: how many there are.
        n: output channels of an expert, those of gate and up together.
        k: input features.
        gated: whether the first n / 2 channels are the gate of the others.
    """

    data: torch.Tensor
    experts: int
    n: int
    k: int
    gated: bool = False

    def __post_init__(self) -> None:
        for name, value in (("experts", self.experts), ("n", self.n), ("k", self.k)):
            checks.integer(name, value, least=1)
        checks.flag("gated", self.gated)
        _check_gated("n", self.n, self.gated)
        checks.tensor("data", self.data, WEIGHT_DTYPES, ("tiles", "blocks", "rows", "depth"))
        shape = packed_shape(self.experts, self.n, self.k, self.gated, self.data.dtype)
        checks.tensor("data", self.data, WEIGHT_DTYPES, shape)
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
        """[experts, n, k], as of the weights that were packed."""
        return torch.Size((self.experts, self.n, self.k))

    def unpack(self) -> torch.Tensor:
        """Return a copy in rows, [experts, n, k]."""
        return unpack(self.data, self.experts, self.n, self.k, self.gated)


def pack_experts(w: torch.Tensor, *, gated: bool = False) -> PackedExperts:
    """Copy the weights of experts into the layout of `PackedExperts`, on their own device.

    One expert is copied after another: beside the result it takes the memory of one. On CUDA it
    returns when the copy is complete, and it cannot be captured.

    Args:
        w: [experts, N, K] int8, float8_e4m3fn, bf16 or fp16 with any strides.
        gated: whether the first N / 2 channels are the gate of the others, as
            `moe_linear(activation="silu_mul")` wants them; N is even then.

    Raises:
        TypeError, ValueError: naming the argument.
    """
    checks.tensor("w", w, WEIGHT_DTYPES, ("experts", "N", "K"), any_strides=True)
    checks.not_empty("w", w, "experts", "N", "K")
    checks.flag("gated", gated)
    _check_gated("w", w.size(1), gated)
    data = pack(w, gated)
    if w.is_cuda:
        torch.cuda.current_stream(w.device).synchronize()
    return PackedExperts(data, w.size(0), w.size(1), w.size(2), gated=gated)


def packed_shape(
    experts: int, n: int, k: int, gated: bool, dtype: torch.dtype
) -> tuple[int, int, int, int]:
    """Return the shape of the data of the weights [experts, n, k]."""
    tiles, *block = packed_weight.packed_shape(_padded_channels(n, gated), k, dtype)
    blocks, rows, depth = block
    return (experts * tiles, blocks, rows, depth)


def tiles_of_expert(n: int, gated: bool) -> int:
    """Return how many tiles of 16 channels an expert's weight [n, k] has."""
    return ceil_div(_padded_channels(n, gated), TILE_CHANNELS)


def pack(w: torch.Tensor, gated: bool) -> torch.Tensor:
    """Return the data of `PackedExperts`."""
    experts, n, k = w.shape
    shape = packed_shape(experts, n, k, gated, w.dtype)
    data = torch.empty(shape, dtype=w.dtype, device=w.device)
    for mine, weight in zip(data.view(torch.int8).chunk(experts), w, strict=True):
        channels = _interleaved(weight) if gated else weight
        mine.copy_(packed_weight.pack(channels).view(torch.int8))
    return data


def unpack(data: torch.Tensor, experts: int, n: int, k: int, gated: bool) -> torch.Tensor:
    """Return the weights [experts, n, k] of the data of `PackedExperts`."""
    found = torch.empty(experts, n, k, dtype=data.dtype, device=data.device)
    for expert in range(experts):
        found.view(torch.int8)[expert] = unpack_one(data, experts, expert, n, k, gated).view(
            torch.int8
        )
    return found


def unpack_one(
    data: torch.Tensor, experts: int, expert: int, n: int, k: int, gated: bool
) -> torch.Tensor:
    """Return the weight [n, k] of one expert."""
    tiles = data.size(0) // experts
    mine = data[expert * tiles : (expert + 1) * tiles]
    if not gated:
        return packed_weight.unpack(mine, n, k)
    pairs = packed_weight.unpack(mine, tiles * TILE_CHANNELS, k).view(torch.int8)
    by_tile = pairs.view(tiles, 2, GATE_CHANNELS, pairs.size(1))
    halves = by_tile.transpose(0, 1).reshape(2, tiles * GATE_CHANNELS, -1)[:, : n // 2]
    return halves.reshape(n, -1).view(data.dtype)


def _interleaved(w: torch.Tensor) -> torch.Tensor:
    """Return a gated weight [n, k] with 8 channels of the gate before the same 8 of up."""
    n = w.size(0) // 2
    data = w.contiguous().view(torch.int8)
    padding = (0, 0, 0, round_up(n, GATE_CHANNELS) - n)
    gate, up = (
        functional.pad(half, padding).view(-1, GATE_CHANNELS, data.size(1))
        for half in (data[:n], data[n:])
    )
    return torch.stack([gate, up], 1).view(-1, data.size(1)).view(w.dtype)


def _padded_channels(n: int, gated: bool) -> int:
    return 2 * round_up(n // 2, GATE_CHANNELS) if gated else n


def _check_gated(name: str, n: int, gated: bool) -> None:
    if gated and n % 2:
        raise ValueError(f"{name}: got {n} channels, expected an even number, of gate and up")
