"""Workspaces of libraries that a step calls, cuBLAS's above all: the graphs' own, in their pool.

Torch keeps one for each stream that cuBLAS has been called on, until somebody clears them all, as
torch.compile does. A graph whose capture found one there would write, from then on, into memory
that others have been given. So a series of captures begins and ends without any: the first call
in a capture makes one in the pool, and eager code never uses it.

Torch lets go of a workspace when it is cleared, and a later capture into the pool could place what
it keeps there. So what earlier captures have left in the pool is held before later ones begin.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

Blocks = Mapping[int, int]  # bytes of each, by address


def clear() -> None:
    """Let torch make new workspaces, on all streams, when they are needed next."""
    torch._C._cuda_clearCublasWorkspaces()


class LibraryWorkspaces:
    """What the captures of one pool leave there, workspaces among it.

    Args:
        blocks: returns the blocks in the pool that are in use, and those that are free.
        capture: calls a function in a capture into the pool, and returns its graph.
        device: where the pool is.
        stream: that of the captures.
    """

    def __init__(
        self,
        blocks: Callable[[], tuple[Blocks, Blocks]],
        capture: Callable[[Callable[[], None]], object],
        device: torch.device,
        stream: torch.cuda.Stream,
    ) -> None:
        self._blocks = blocks
        self._capture = capture
        self._place = (device, stream)
        self._left: dict[int, int] = {}
        self._held: list[int] = []
        self._opening: object = None

    def begin(self) -> None:
        """Make ready for a series of captures, after their warm-up."""
        clear()
        if self._gone():
            # Kept until the end: torch clears the workspaces of a graph's stream when that goes.
            self._opening = self._capture(self._take_again)

    def end(self) -> None:
        """Note what a series of captures has left, and part it from eager code."""
        self._left = dict(self._blocks()[0])
        self._opening = None
        clear()

    def release(self) -> None:
        """Let go of what is held, after the last graph of the pool."""
        self._left.clear()
        while self._held:
            torch.cuda.caching_allocator_delete(self._held.pop())

    def _take_again(self) -> None:
        # Takes the memory of the last workspace again, where that is a block of its own.
        torch.cuda.current_blas_handle()
        for start, size in self._gone():
            self._hold(start, size)

    def _gone(self) -> list[tuple[int, int]]:
        """Return the free blocks, with their bytes, in what earlier captures have left."""
        left = self._left.items()
        return [
            (start, size)
            for start, size in self._blocks()[1].items()
            if any(start < address + length and address < start + size for address, length in left)
        ]

    def _hold(self, start: int, size: int) -> None:
        """Take a free block of the pool.

        The allocator gives the first of the smallest blocks that suffice: of those of the same
        size this one's turn comes. A block that it would round up stays free.
        """
        others: list[int] = []
        got, free = None, len(self._blocks()[1])
        while got != start and len(others) < free:
            got = torch.cuda.caching_allocator_alloc(size, *self._place)
            (self._held if got == start else others).append(got)
        for other in others:
            torch.cuda.caching_allocator_delete(other)
