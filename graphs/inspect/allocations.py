"""Which memory an address lies in: the ranges that a captured graph may know, and their names."""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path


class State(Enum):
    """What is known of a range."""

    KEPT = "kept"  # it stays as long as the graphs do: pool, buffers, declared memory
    LIVE = "live"  # a tensor has it now, but nobody has said for how long
    FREED = "freed"  # torch's allocator has it in reserve and may give it to anybody


@dataclass(frozen=True)
class Allocation:
    """`size` bytes from the address `start`; `label` says what they are, in a message."""

    start: int
    size: int
    label: str
    state: State = State.KEPT

    @property
    def end(self) -> int:
        """The address after the last byte."""
        return self.start + self.size


def mapped_by_host(maps: Path = Path("/proc/self/maps")) -> list[Allocation]:
    """Return what the process can read itself, so that no device memory is there.

    Nothing where there is no such file. The device's address range is reserved in the process too,
    but so that it cannot be read, or through a file of the driver's.
    """
    try:
        lines = maps.read_bytes().split(b"\n")[:-1]  # names of files may be of any bytes
    except OSError:
        return []
    ranges = []
    for line in lines:
        span, permissions, *rest = line.split(maxsplit=5)
        if permissions.startswith(b"r") and not rest[-1].startswith(b"/dev/nvidia"):
            start, end = (int(bound, 16) for bound in span.split(b"-"))
            ranges.append(Allocation(start, end - start, "the host's memory"))
    return ranges


class Allocations:
    """Finds the range that holds an address; where ranges overlap, the one listed first."""

    def __init__(self, ranges: Iterable[Allocation]) -> None:
        listed = [allocation for allocation in ranges if allocation.size > 0]
        bounds = sorted({a.start for a in listed} | {a.end for a in listed})
        by_start = sorted(range(len(listed)), key=lambda i: listed[i].start)
        self._starts: list[int] = []
        self._owners: list[Allocation | None] = []
        active: list[int] = []  # a heap of indices, so that the first listed is at the top
        begun = 0
        for bound in bounds:
            while begun < len(by_start) and listed[by_start[begun]].start <= bound:
                heapq.heappush(active, by_start[begun])
                begun += 1
            while active and listed[active[0]].end <= bound:
                heapq.heappop(active)
            self._starts.append(bound)
            self._owners.append(listed[active[0]] if active else None)

    def find(self, address: int) -> Allocation | None:
        """Return the first listed range that holds `address`; None if there is none."""
        index = bisect_right(self._starts, address) - 1
        return self._owners[index] if index >= 0 else None

    def spans(self, address: int) -> bool:
        """Return whether `address` lies between the lowest and the highest of all ranges."""
        return bool(self._starts) and self._starts[0] <= address < self._starts[-1]
