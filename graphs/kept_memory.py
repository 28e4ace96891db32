"""Memory that libraries keep for graphs: workspaces of their kernels, while those graphs live."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol
from weakref import WeakSet

import torch


class KeepsMemory(Protocol):
    """What keeps memory that captured launches use for as long as their graphs live."""

    def memory_of_graphs(self) -> Iterable[torch.Tensor]:
        """Return the tensors that hold it now."""


_known: WeakSet[KeepsMemory] = WeakSet()


def register_keeper(keeper: KeepsMemory) -> None:
    """Let audits know what a library keeps, so that no caller has to declare it.

    An audit cannot tell by itself: where memory has been freed since the captures began, an address
    that is new looks old. A keeper is known for as long as it lives.
    """
    _known.add(keeper)


def kept_by_libraries() -> Iterator[torch.Tensor]:
    """Yield what registered keepers hold now."""
    for keeper in list(_known):
        yield from keeper.memory_of_graphs()
