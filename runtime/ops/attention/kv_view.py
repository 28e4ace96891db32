"""Fetching keys and values, dequantised to fp32, out of paged caches and packed tensors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..common.e4m3 import as_bytes, to_float32

Pair = tuple[torch.Tensor, torch.Tensor]


class Spans(NamedTuple):
    """Which keys n sequences see: `first` to `length` - 1 of each one.

    `members` [n] int64 says which sequences of the batch they are.
    """

    members: torch.Tensor
    first: Sequence[int]
    length: Sequence[int]


@dataclass
class KV(ABC):
    """Keys and values of a batch of sequences, in a layout that the subclass knows.

    Keys and values are [..., heads, dim], of one shape but for the dim; their scales are as in
    `paged_attention`.
    """

    k: torch.Tensor
    v: torch.Tensor
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None

    @abstractmethod
    def heads(self, spans: Spans, start: int, stop: int) -> Pair:
        """Return the keys and values [n * heads, stop - start, dim] of n sequences, fp32.

        Those at positions start .. stop - 1 that no query sees are arbitrary, and 0 from a
        sequence's end on. Every sequence has some that are seen. For the CPU.
        """

    def tile(self, b: int, position: torch.Tensor, seen: torch.Tensor) -> Pair:
        """Return the keys and values [size, heads, dim] of sequence b at `position` [size].

        Where not `seen` [size] they are arbitrary ones, and no position is looked up.
        """
        index = self._index(b, position, ~seen)
        return self._fetched(lambda x: x[index])

    @abstractmethod
    def _index(
        self, b: int, position: torch.Tensor, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Return the index of each position of sequence b, a valid one where it is hidden."""

    def _heads(
        self,
        select: Callable[[torch.Tensor], torch.Tensor],
        spans: Spans,
        start: int,
        stop: int,
    ) -> Pair:
        """Return what `select` finds in [..., heads, dim], [n, T, heads, dim], as `heads` does."""
        found = []
        for x, scale in ((self.k, self.k_scale), (self.v, self.v_scale)):
            numbers = to_float32(select(as_bytes(x)).view(x.dtype).transpose(1, 2))
            if scale is not None:
                per_token = scale.ndim == x.ndim - 1
                by_head = select(scale).transpose(1, 2) if per_token else scale.view(-1, 1)
                numbers.mul_(by_head.unsqueeze(-1))
            for row, length in zip(numbers, spans.length, strict=True):
                if length < stop:
                    row[:, length - start :] = 0.0
            found.append(numbers.flatten(0, 1))
        return found[0], found[1]

    def _fetched(self, select: Callable[[torch.Tensor], torch.Tensor]) -> Pair:
        return (
            _dequantized(self.k, self.k_scale, select),
            _dequantized(self.v, self.v_scale, select),
        )


@dataclass
class PagedKV(KV):
    """Keys and values in pages; `page_table` is that of `paged_attention`."""

    page_table: torch.Tensor

    def heads(self, spans: Spans, start: int, stop: int) -> Pair:
        """Return the keys and values [n * heads, stop - start, dim] of n sequences, fp32."""
        page_size = self.k.size(1)
        first_page = start // page_size
        # What the table holds for keys that nobody sees must never become an address: there it is
        # the page of the first key or the last one that is seen.
        last_page = (stop - 1) // page_size
        columns = [
            [
                min(max(page, first // page_size), (length - 1) // page_size)
                for page in range(first_page, last_page + 1)
            ]
            for first, length in zip(spans.first, spans.length, strict=True)
        ]
        index = torch.tensor(columns, device="cpu")
        pages = self.page_table.index_select(0, spans.members).gather(1, index)
        skipped = start - first_page * page_size

        def select(x: torch.Tensor) -> torch.Tensor:
            rows = x.index_select(0, pages.flatten())
            rows = rows.view(pages.size(0), -1, *rows.shape[2:])
            return rows[:, skipped : skipped + stop - start]

        return self._heads(select, spans, start, stop)

    def _index(
        self, b: int, position: torch.Tensor, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        page_size = self.k.size(1)
        # What the table holds for keys that nobody sees must never become an address.
        entry = (position // page_size).clamp_max_(self.page_table.size(1) - 1)
        page = self.page_table[b].index_select(0, entry).masked_fill_(hidden, 0)
        return page, position % page_size


@dataclass
class PackedKV(KV):
    """Keys and values one sequence after the other, as in `varlen_attention`."""

    cu_seqlens: torch.Tensor

    def heads(self, spans: Spans, start: int, stop: int) -> Pair:
        """Return the keys and values [n * heads, stop - start, dim] of n sequences, fp32."""
        ends = torch.tensor(spans.length, device="cpu").unsqueeze(1)
        positions = torch.minimum(torch.arange(start, stop, device="cpu"), ends - 1)
        index = self.cu_seqlens[spans.members].unsqueeze(1) + positions

        def select(x: torch.Tensor) -> torch.Tensor:
            rows = x.index_select(0, index.flatten())
            return rows.view(*index.shape, *rows.shape[1:])

        return self._heads(select, spans, start, stop)

    def _index(
        self, b: int, position: torch.Tensor, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        return ((self.cu_seqlens[b] + position).masked_fill_(hidden, 0),)


def _dequantized(
    x: torch.Tensor,
    scale: torch.Tensor | None,
    select: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    selected = select(as_bytes(x))
    values = to_float32(selected if selected.dtype is x.dtype else selected.view(x.dtype))
    if scale is None:
        return values
    if scale.ndim == x.ndim - 1:
        scale = select(scale)
    return values.mul_(scale.unsqueeze(-1) if scale.ndim else scale)
