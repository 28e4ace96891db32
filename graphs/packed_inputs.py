"""The memory of static buffers: one block, in which a batch of each size lies packed.

Packed, all inputs of a batch, their padding and the number of real rows take one copy to the
device. Batches of different sizes use the same bytes differently, and one after the other: each
batch is staged whole before it is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from .buffer_spec import BufferSpec
from .kept import keep

_ALIGNMENT = 256  # bytes: what vector loads and bulk copies ask for, and more
_WORD = 8  # bytes
_PIECE = 2048  # words: torch's kernel for many copies gives them to a CTA, in one round


class PackedInputs:
    """The rows of all buffers in one block of memory, for every batch size.

    Args:
        specs: of the buffers.
        max_batch: the largest batch size.
        device: where the block is.
        words: int64 memory of the block, at least `words_of` as many; by default its own, zero.

    Attributes:
        n_active: int32 [1] at the start of the block, the same for all batch sizes.
    """

    def __init__(
        self,
        specs: Mapping[str, BufferSpec],
        max_batch: int,
        device: torch.device,
        *,
        words: torch.Tensor | None = None,
    ) -> None:
        self._specs = specs
        size = _layout(specs, max_batch)[1]
        if words is None:
            words = torch.zeros(size // _WORD, dtype=torch.int64, device=device)
        self._words = words
        self._bytes = words.view(torch.uint8)
        self.n_active = self._bytes[:4].view(torch.int32)
        # Slicing costs as much as copying a few rows, so slices are kept.
        self._batches: dict[int, dict[str, torch.Tensor]] = {}
        self._heads: dict[tuple[int, int], dict[str, torch.Tensor]] = {}
        self._packed: dict[int, torch.Tensor] = {}
        self._pieces: dict[tuple[int, int, tuple[str, ...]], list[torch.Tensor]] = {}
        self._start = self._bytes.data_ptr()
        self._stop = self._start + size

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is a view of the block."""
        return self._start <= tensor.data_ptr() < self._stop

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
            keep(self._heads, (size, n), rows)
        return rows

    def packed(self, size: int) -> torch.Tensor:
        """Return all bytes of a batch of `size`, the number of real rows included."""
        packed = self._packed.get(size)
        if packed is None:
            with torch.inference_mode(False):
                packed = self._packed[size] = self._bytes[: _layout(self._specs, size)[1]]
        return packed

    def pieces(self, size: int, n: int, without: tuple[str, ...]) -> list[torch.Tensor]:
        """Return a batch of `size` in pieces of int64, but for the first `n` rows of some buffers.

        They are the same of all packed inputs of these specs.

        Args:
            size: of the batch.
            n: rows that are left out.
            without: names of the buffers that these are of, with rows of whole words.
        """
        key = size, n if without else 0, without
        pieces = self._pieces.get(key)
        if pieces is None:
            with torch.inference_mode(False):
                pieces = [self._words[low:high] for low, high in self._ranges(size, n, without)]
            keep(self._pieces, key, pieces)
        return pieces

    def pad(self, size: int) -> None:
        """Write padding into all rows of a batch of `size`, none of them real."""
        for name, rows in self.batch(size).items():
            rows.fill_(self._specs[name].pad)
        self.n_active.zero_()

    def _views(self, size: int) -> dict[str, torch.Tensor]:
        views = {}
        for name, offset in _layout(self._specs, size)[0].items():
            spec = self._specs[name]
            rows = self._bytes[offset : offset + size * spec.row_bytes].view(spec.dtype)
            views[name] = rows.view(size, *spec.shape)
        return views

    def _ranges(self, size: int, n: int, without: tuple[str, ...]) -> Iterator[tuple[int, int]]:
        """Yield the first word of each piece and the one after its last."""
        offsets, end = _layout(self._specs, size)
        begin = 0
        for name, offset in offsets.items():
            if name in without:
                yield from _cut(begin, offset // _WORD)
                begin = (offset + n * self._specs[name].row_bytes) // _WORD
        yield from _cut(begin, end // _WORD)


def words_of(specs: Mapping[str, BufferSpec], max_batch: int) -> int:
    """Return how many 64-bit words the rows of all buffers take."""
    return _layout(specs, max_batch)[1] // _WORD


def is_whole_words(rows: torch.Tensor) -> bool:
    """Return whether rows can be copied as they lie, as words."""
    return rows.element_size() == _WORD and rows.is_contiguous()


def as_words(rows: torch.Tensor) -> torch.Tensor:
    """Return rows as one row of words."""
    return rows.view(torch.int64).view(-1)


def _cut(begin: int, end: int) -> Iterator[tuple[int, int]]:
    for low in range(begin, end, _PIECE):
        yield low, min(low + _PIECE, end)


def _layout(specs: Mapping[str, BufferSpec], size: int) -> tuple[dict[str, int], int]:
    """Return where each buffer's rows of a batch of `size` begin, and their end, in bytes."""
    offsets, end = {}, _ALIGNMENT
    for name, spec in specs.items():
        offsets[name] = end
        end = _aligned(end + size * spec.row_bytes)
    return offsets, end


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
