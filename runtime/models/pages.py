"""Page bookkeeping of the KV cache: reference counts, the free list, and pages kept for reuse."""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence

DUMMY_PAGE = 0


class OutOfPagesError(RuntimeError):
    """The cache has too few free pages; nothing was changed."""


class PagePool:
    """Hands out page ids and remembers which full pages hold the keys and values of which tokens.

    Page 0 is the dummy page that padding rows point at; it is never handed out. A page is *used*
    (one reference per sequence that holds it), *free*, or *kept*: unused, but its tokens are
    known, so a later sequence with the same prefix may take it back. Kept pages count as free
    and are given up least recently used first, in each L2 partition or in all of them.

    Args:
        num_pages: the dummy page included.
        partition_of: the L2 partition, 0 or 1, that holds a page; by default they are alike.
        one_order: a page is given up only where none is free, and the least recently used of both
            partitions. So pools whose pages lie elsewhere keep the same tokens.

    Attributes:
        evictions: kept pages that were given up so far.
    """

    def __init__(
        self,
        num_pages: int,
        partition_of: Callable[[int], int] | None = None,
        *,
        one_order: bool = False,
    ) -> None:
        if num_pages < 2:
            raise ValueError(
                f"num_pages: got {num_pages}, expected at least 2 (page 0 is the dummy page)"
            )
        self.num_pages = num_pages
        self.evictions = 0
        self._references = [0] * num_pages
        self._partition_of = partition_of
        self._one_order = one_order
        # By partitions; kept pages of one order are all in the first.
        self._free: tuple[list[int], list[int]] = ([], [])
        self._kept: tuple[OrderedDict[int, None], ...] = (OrderedDict(), OrderedDict())
        for page in range(num_pages - 1, DUMMY_PAGE, -1):
            self._free[self._partition(page)].append(page)
        self._page_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}

    @property
    def available(self) -> int:
        """Pages that `take` could hand out now."""
        return sum(map(len, (*self._free, *self._kept)))

    def references(self, page: int) -> int:
        """Return how many sequences hold `page`."""
        return self._references[page]

    def take(self, count: int, *, like: int | None = None) -> list[int]:
        """Return `count` pages with one reference each, as many as there are in one partition.

        Args:
            count: how many.
            like: a page whose partition it shall be; None: the partition with more free pages.

        Raises:
            OutOfPagesError: when fewer are available; nothing is taken then.
        """
        if count > self.available:
            raise OutOfPagesError(
                f"KV cache: {count} pages needed, {self.available} of {self.num_pages - 1} free"
            )
        while self._one_order and sum(map(len, self._free)) < count:
            given_up = self._evict(0)
            self._free[self._partition(given_up)].append(given_up)
        left = [len(free) + len(kept) for free, kept in zip(self._free, self._kept, strict=True)]
        partition = int(left[1] > left[0]) if like is None else self._partition(like)
        pages = []
        for _ in range(count):
            page = self._take_from(partition)
            if page is None:
                page = self._take_from(1 - partition)
            assert page is not None, "as many are available"
            self._references[page] = 1
            pages.append(page)
        return pages

    def share(self, pages: Sequence[int]) -> None:
        """Add a reference to each page, taking kept ones back into use."""
        for page in pages:
            self._references[page] += 1
            self._kept_like(page).pop(page, None)

    def release(self, pages: Sequence[int]) -> None:
        """Drop a reference to each page."""
        # The end of a prefix goes first: it is useless once its beginning has been evicted.
        for page in reversed(pages):
            self._references[page] -= 1
            if self._references[page] == 0:
                if page in self._digest_of:
                    self._kept_like(page)[page] = None
                else:
                    self._free[self._partition(page)].append(page)

    def publish(self, pages: Sequence[int], tokens: Sequence[int], page_size: int) -> None:
        """Make the full pages of `tokens` findable by `match`; known content keeps its page."""
        for page, digest in zip(pages, _digests(tokens, page_size), strict=False):
            if digest not in self._page_of and page not in self._digest_of:
                self._page_of[digest] = page
                self._digest_of[page] = digest

    def match(self, tokens: Sequence[int], page_size: int) -> list[int]:
        """Return the pages that hold the longest known prefix of `tokens`, in whole pages.

        They are not referenced yet: call `share` before anything else can evict them.
        """
        pages = []
        for digest in _digests(tokens, page_size):
            if digest not in self._page_of:
                break
            pages.append(self._page_of[digest])
        return pages

    def _partition(self, page: int) -> int:
        return 0 if self._partition_of is None else self._partition_of(page)

    def _take_from(self, partition: int) -> int | None:
        """Take a free page of a partition, or else a kept one; None where there is neither."""
        if self._free[partition]:
            return self._free[partition].pop()
        if self._one_order or not self._kept[partition]:
            return None
        return self._evict(partition)

    def _kept_like(self, page: int) -> OrderedDict[int, None]:
        return self._kept[0 if self._one_order else self._partition(page)]

    def _evict(self, partition: int) -> int:
        """Give up the kept page that was used least recently."""
        page, _ = self._kept[partition].popitem(last=False)
        del self._page_of[self._digest_of.pop(page)]
        self.evictions += 1
        return page


def _digests(tokens: Sequence[int], page_size: int) -> list[bytes]:
    """Digest of every prefix of `tokens` that ends at a page boundary."""
    digests = []
    running = hashlib.blake2b(digest_size=16)
    for end in range(page_size, len(tokens) + 1, page_size):
        running.update(array("q", tokens[end - page_size : end]).tobytes())
        digests.append(running.digest())
    return digests
