"""Examples for verifying captured steps, on pages of the cache that no request holds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ostinato.graphs.buffer_spec import Example

from ..interrupts import Uninterrupted
from ..models import PagedKVCache

_SEQUENCE = -1  # that holds the pages; requests count from 0


class CaptureExamples:
    """Lends examples free pages full of random numbers, while nothing is served.

    A verification that read zeros and wrote nothing would pass with a frozen page table.

    Args:
        cache: whose pages.
        pages: how many are lent, if so many are free.
    """

    def __init__(self, cache: PagedKVCache, pages: int) -> None:
        self._cache = cache
        self._wanted = pages
        self._pages: list[int] = []
        self._lent = False

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Hold the pages; the examples below need it around them."""
        cache = self._cache
        self.end()
        try:
            with Uninterrupted():
                cache.add(_SEQUENCE)
                self._lent = True
                cache.reserve(_SEQUENCE, min(self._wanted, cache.free_pages) * cache.page_size)
            self._pages = cache.pages(_SEQUENCE)
            # Not the caller's generator, and the same contents when a verification is repeated.
            generator = torch.Generator(cache.storage.device).manual_seed(0)
            cache.randomize(self._pages, generator)
            yield
        finally:
            self.end()

    def end(self) -> None:
        """Take the pages back, if Ctrl-C in the end of `lent` has left them."""
        if self._lent:
            with Uninterrupted():
                self._pages = []
                self._cache.free(_SEQUENCE)
                self._lent = False

    def page_table(self, generator: torch.Generator, shape: tuple[int, ...]) -> torch.Tensor:
        """Return a table of that shape, of the pages that are lent."""
        pages = torch.tensor(self._pages)
        return pages[torch.randint(len(pages), shape, generator=generator)]

    def slot_mapping(self, generator: torch.Generator, shape: tuple[int, ...]) -> torch.Tensor:
        """Return slots of these pages, one for each row."""
        size = self._cache.page_size
        slots = torch.tensor(self._pages)[:, None] * size + torch.arange(size)
        chosen = slots.flatten()[torch.randperm(slots.numel(), generator=generator)]
        # No two rows write to one slot; where there are more rows, the others write nothing.
        rows = torch.full(shape, -1)
        rows[: len(chosen)] = chosen[: len(rows)]
        return rows


def integers(low: int, high: int) -> Example:
    """Return an example of integers from `low` to `high` - 1."""

    def draw(generator: torch.Generator, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator)

    return draw
