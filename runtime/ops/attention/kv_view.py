"""Fetching keys and values, dequantised to fp32, out of paged caches and packed tensors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..common.e4m3 import as_bytes, to_float32

Pair = tuple[torch.Tensor, torch.Tensor]


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
    def live(self, b: int, start: int, stop: int) -> Pair:
        """Return the keys and values [stop - start, heads, dim] of sequence b from `start` on."""

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

    def _fetched(self, select: Callable[[torch.Tensor], torch.Tensor]) -> Pair:
        return (
            _dequantized(self.k, self.k_scale, select),
            _dequantized(self.v, self.v_scale, select),
        )


@dataclass
class PagedKV(KV):
    """Keys and values in pages; `page_table` is that of `paged_attention`."""

    page_table: torch.Tensor

    def live(self, b: int, start: int, stop: int) -> Pair:
        """Return the keys and values [stop - start, heads, dim] of sequence b from `start` on."""
        page_size = self.k.size(1)
        first_page = start // page_size
        pages = self.page_table[b, first_page : -(-stop // page_size)]
        skipped = start - first_page * page_size

        def select(x: torch.Tensor) -> torch.Tensor:
            rows = x.index_select(0, pages).flatten(0, 1)
            return rows[skipped : skipped + stop - start]

        return self._fetched(select)

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

    def live(self, b: int, start: int, stop: int) -> Pair:
        """Return the keys and values [stop - start, heads, dim] of sequence b from `start` on."""
        origin = int(self.cu_seqlens[b])
        return self._fetched(lambda x: x[origin + start : origin + stop])

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
