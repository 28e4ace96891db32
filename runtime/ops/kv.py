"""Fetching keys and values, dequantised to fp32, out of paged caches and packed tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from ostinato.ops.e4m3 import as_bytes, to_float32

Pair = tuple[torch.Tensor, torch.Tensor]


class PagedKV(NamedTuple):
    """Keys and values in pages; the arguments are those of `paged_attention`."""

    k_cache: torch.Tensor
    v_cache: torch.Tensor
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None
    page_table: torch.Tensor

    def live(self, b: int, start: int, stop: int) -> Pair:
        """Return the keys and values [stop - start, heads, dim] of sequence b from `start` on."""
        page_size = self.k_cache.size(1)
        first_page = start // page_size
        pages = self.page_table[b, first_page : -(-stop // page_size)]
        skipped = start - first_page * page_size

        def select(x: torch.Tensor) -> torch.Tensor:
            rows = x.index_select(0, pages).flatten(0, 1)
            return rows[skipped : skipped + stop - start]

        return self._fetched(select)

    def tile(self, b: int, start: int, size: int, k_len: torch.Tensor) -> Pair:
        """Return the keys and values [size, heads, dim] from `start` on, zero from k_len [] on."""
        page_size = self.k_cache.size(1)
        position = torch.arange(start, start + size, device=k_len.device)
        hidden = position >= k_len
        # What the table holds past the sequence's end must never become an address.
        entry = (position // page_size).clamp_max_(self.page_table.size(1) - 1)
        page = self.page_table[b].index_select(0, entry).masked_fill_(hidden, 0)
        k, v = self._fetched(lambda x: x[page, position % page_size])
        return _zeroed(k, hidden), _zeroed(v, hidden)

    def _fetched(self, select: Callable[[torch.Tensor], torch.Tensor]) -> Pair:
        return (
            _dequantized(self.k_cache, self.k_scale, select),
            _dequantized(self.v_cache, self.v_scale, select),
        )


class PackedKV(NamedTuple):
    """Keys and values one sequence after the other; the arguments are those of `varlen_attention`.

    `starts` holds cu_seqlens_k, on the host for `live` and on the device for `tile`.
    """

    k: torch.Tensor
    v: torch.Tensor
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None
    starts: list[int] | torch.Tensor

    def live(self, b: int, start: int, stop: int) -> Pair:
        """Return the keys and values [stop - start, heads, dim] of sequence b from `start` on."""
        origin = int(self.starts[b])
        return self._fetched(lambda x: x[origin + start : origin + stop])

    def tile(self, b: int, start: int, size: int, k_len: torch.Tensor) -> Pair:
        """Return the keys and values [size, heads, dim] from `start` on, zero from k_len [] on."""
        position = torch.arange(start, start + size, device=k_len.device)
        hidden = position >= k_len
        row = (self.starts[b] + position).masked_fill_(hidden, 0)
        k, v = self._fetched(lambda x: x[row])
        return _zeroed(k, hidden), _zeroed(v, hidden)

    def _fetched(self, select: Callable[[torch.Tensor], torch.Tensor]) -> Pair:
        return (
            _dequantized(self.k, self.k_scale, select),
            _dequantized(self.v, self.v_scale, select),
        )


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


def _zeroed(x: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    # A hidden value may be NaN, and would reach the result as 0 · NaN.
    return x.masked_fill_(hidden.view(-1, 1, 1), 0.0)
