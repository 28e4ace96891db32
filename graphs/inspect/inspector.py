"""What is read of graphs and of the memory they use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ..graph import Graph, MemoryUse
from ..outputs import Outputs
from .allocations import Allocation
from .nodes import GraphNodes


class Inspector(Protocol):
    """Reads graphs and device memory, and changes neither; used inside `Backend.scope`."""

    def owned(self, outputs: Outputs) -> Sequence[int]:
        """Return which of a graph's outputs, by index, are in its own memory, not the step's."""

    def memory(self) -> MemoryUse | None:
        """Measure device memory; None where graphs take none."""

    def check_readable(self) -> None:
        """Raise GraphError where `nodes` will, with the remedy."""

    def nodes(self, graph: Graph) -> GraphNodes | None:
        """Read what a graph consists of; None where nothing is recorded.

        Raises:
            GraphError: when it cannot be read.
        """

    def allocations(self) -> Sequence[Allocation]:
        """Return the device memory that torch's allocator has, the graphs' pool first."""

    def location_of(self, address: int) -> str | None:
        """Return "device 0" or "the host", which means pinned; None if the driver knows neither."""


class NoInspector:
    """Of a backend that records nothing: there are no nodes, and there is no device memory."""

    def owned(self, outputs: Outputs) -> Sequence[int]:
        """Return all: outputs are copied into memory of the backend."""
        return range(len(outputs.tensors))

    def memory(self) -> MemoryUse | None:
        """Return None: there is no device memory."""
        return None

    def check_readable(self) -> None:
        """Find nothing wrong: there will be nothing to read."""

    def nodes(self, graph: Graph) -> GraphNodes | None:
        """Return None: nothing is recorded."""
        return None

    def allocations(self) -> Sequence[Allocation]:
        """Return none: there is no device memory."""
        return ()

    def location_of(self, address: int) -> str | None:
        """Return None: there is no device memory."""
        return None
