"""The memory of static buffers: one block, in which a batch of each size lies packed.

Packed, all inputs of a batch, their padding and the number of real rows take one copy to the
device. Batches of different sizes use the same bytes differently, and one after the other: each
batch is staged whole before it is read.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ostinato.graphs.spec import BufferSpec

_ALIGNMENT = 256  # bytes: what vector loads and bulk copies ask for, and more


class Arena:
    """The rows of all buffers in one block of memory, for every batch size.

    Args:
        specs: of the buffers.
        max_batch: the largest batch size.
        device: where the block is.
        pin_memory: whether it is pinned.

    Attributes:
        n_active: int32 [1] at the start of the block, the same for all batch sizes.
    """

    def __init__(
        self,
        specs: Mapping[str, BufferSpec],
        max_batch: int,
        device: torch.device,
        *,
        pin_memory: bool = False,
    ) -> None:
        self._specs = specs
        size = self._end(max_batch)
        self._bytes = torch.zeros(size, dtype=torch.uint8, device=device, pin_memory=pin_memory)
        self.n_active = self._bytes[:4].view(torch.int32)
        # Slicing costs as much as copying a few rows, so every slice is made once.
        self._batches: dict[int, dict[str, torch.Tensor]] = {}
        self._heads: dict[tuple[int, int], dict[str, torch.Tensor]] = {}
        self._packed: dict[int, torch.Tensor] = {}

    def batch(self, size: int) -> dict[str, torch.Tensor]:
        """Return the rows of each buffer in a batch of `size`; the same tensors every time."""
        rows = self._batches.get(size)
        if rows is None:
            with torch.inference_mode(False):  # or they could not be written outside of it
                rows = self._batches[size] = self._views(size)
        return rows

    def head(self, size: int, n: int) -> dict[str, torch.Tensor]:
        """Return the first `n` rows of each buffer in a batch of `size`."""
        rows = self._heads.get((size, n))
        if rows is None:
            with torch.inference_mode(False):
                rows = {name: tensor[:n] for name, tensor in self.batch(size).items()}
            self._heads[size, n] = rows
        return rows

    def packed(self, size: int) -> torch.Tensor:
        """Return all bytes of a batch of `size`, the number of real rows included."""
        packed = self._packed.get(size)
        if packed is None:
            with torch.inference_mode(False):
                packed = self._packed[size] = self._bytes[: self._end(size)]
        return packed

    def pad(self, size: int) -> None:
        """Write padding into all rows of a batch of `size`, none of them real."""
        for name, rows in self.batch(size).items():
            rows.fill_(self._specs[name].pad)
        self.n_active.zero_()

    def _views(self, size: int) -> dict[str, torch.Tensor]:
        views, offset = {}, _ALIGNMENT
        for name, spec in self._specs.items():
            end = offset + size * spec.row_bytes
            rows = self._bytes[offset:end].view(spec.dtype)
            views[name] = rows.view(size, *spec.shape)
            offset = _aligned(end)
        return views

    def _end(self, size: int) -> int:
        return _ALIGNMENT + sum(_aligned(size * spec.row_bytes) for spec in self._specs.values())


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
