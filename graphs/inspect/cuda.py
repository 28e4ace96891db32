"""Reads CUDA graphs through cuda-python, and device memory through torch's allocator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, cast

import torch

from ..graph import Graph, MemoryUse
from ..outputs import Outputs
from .allocations import Allocation, State
from .driver import GraphDriver
from .nodes import GraphNodes

PoolHandle = tuple[int, int]
_STATES = {"active_allocated": State.LIVE}


class Recorded(Protocol):
    """A graph of CUDA."""

    @property
    def handle(self) -> int:
        """The address of its `cudaGraph_t`."""


class CudaInspector:
    """Reads what a `CudaBackend` has captured; see `Inspector`.

    Args:
        device: the backend's device.
        pool: the memory pool of its graphs; the backend sets it anew for each series of captures.
    """

    def __init__(self, device: torch.device, pool: PoolHandle | None) -> None:
        self._device = device
        self.pool = pool
        self._driver: GraphDriver | None = None

    @property
    def driver(self) -> GraphDriver:
        """What reads graphs; GraphError when cuda-python is missing."""
        self.check_readable()
        return cast("GraphDriver", self._driver)

    def owned(self, outputs: Outputs) -> Sequence[int]:
        """Return which outputs the capture allocated, by index: those in the pool."""
        segments = self._pool_segments()
        return [
            index
            for index, tensor in enumerate(outputs.tensors)
            if any(start <= tensor.data_ptr() < start + size for start, size in segments)
        ]

    def pool_blocks(self) -> tuple[dict[int, int], dict[int, int]]:
        """Return the pool's blocks in use, and its free ones: bytes of each, by address."""
        used: dict[int, int] = {}
        free: dict[int, int] = {}
        for segment in self._segments():
            start = segment["address"]
            for block in segment["blocks"]:
                is_free = block["state"] == "inactive"
                (free if is_free else used)[start] = block["size"]
                start += block["size"]
        return used, free

    def memory(self) -> MemoryUse | None:
        """Measure the pool through torch's allocator, and free memory through the driver."""
        pool_bytes = sum(size for _, size in self._pool_segments())
        return MemoryUse(pool_bytes, torch.cuda.mem_get_info(self._device)[0])

    def check_readable(self) -> None:
        """Raise GraphError when there is no cuda-python to read graphs with."""
        if self._driver is None:
            self._driver = GraphDriver.load()

    def nodes(self, graph: Graph) -> GraphNodes | None:
        """Read a graph through cuda-python."""
        return self.driver.read(cast("Recorded", graph).handle)

    def allocations(self) -> Sequence[Allocation]:
        """Return the pool, and each block of the allocator's other segments on this device."""
        pool, others = [], []
        for segment in torch.cuda.memory_snapshot():
            if segment["device"] != self._device.index:
                continue
            if tuple(segment["segment_pool_id"]) == self.pool:
                # What the capture freed in it is the graphs' all the same.
                label = "the graphs' pool"
                pool.append(Allocation(segment["address"], segment["total_size"], label))
                continue
            start = segment["address"]
            for block in segment["blocks"]:
                state = _STATES.get(block["state"], State.FREED)
                label = f"{block['size']} bytes of torch's allocator"
                others.append(Allocation(start, block["size"], label, state))
                start += block["size"]
        return [*pool, *others]

    def location_of(self, address: int) -> str | None:
        """Ask the driver through cuda-python."""
        return self.driver.location_of(address)

    def _pool_segments(self) -> list[tuple[int, int]]:
        return [(segment["address"], segment["total_size"]) for segment in self._segments()]

    def _segments(self) -> list[dict[str, Any]]:
        # Of all pools: asked for one, torch (to 2.14; pull request 196366) drops references to the
        # numbers of its handle that are not its own, which ends the process some captures later.
        return [
            segment
            for segment in torch.cuda.memory_snapshot()
            if tuple(segment["segment_pool_id"]) == self.pool
            and segment["device"] == self._device.index
        ]
