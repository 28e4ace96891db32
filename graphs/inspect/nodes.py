"""What a captured graph consists of, as plain values: nodes, the edges between them, addresses."""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# Device memory lies between these, and nearly all counts and scalars below.
_LOWEST_ADDRESS = 1 << 32
_HIGHEST_ADDRESS = 1 << 57


@dataclass(frozen=True)
class Word:
    """64 bits of a node that may be an address.

    Attributes:
        value: the bits, as an unsigned integer.
        place: where in the node, as a person would say it: "parameter 0, byte 24".
        is_address: True where the driver says that it is one, False where only its value may.
    """

    value: int
    place: str
    is_address: bool = False


@dataclass(frozen=True)
class Node:
    """One node of a graph.

    Attributes:
        kind: "kernel", "memcpy", "memset", "host", "allocation" and so on.
        name: of the kernel, as in its source; empty for other kinds.
        grid, block: launch dimensions of a kernel.
        words: addresses in it, or what may be some.
        unread: why the words could not be read; empty where they were.
    """

    kind: str
    name: str = ""
    grid: tuple[int, int, int] | None = None
    block: tuple[int, int, int] | None = None
    words: Sequence[Word] = ()
    unread: str = ""

    def __str__(self) -> str:
        """Return the kind, and the name if there is one."""
        return f"{self.kind} {self.name}" if self.name else self.kind


@dataclass(frozen=True)
class Edge:
    """`target` waits for `source`, both indices of nodes.

    Attributes:
        programmatic: whether it may begin before the other has ended (programmatic dependent
            launch): it waits by itself for what it needs.
    """

    source: int
    target: int
    programmatic: bool = False


@dataclass(frozen=True)
class GraphNodes:
    """A captured graph; the nodes of child graphs follow those of their parent."""

    nodes: Sequence[Node]
    edges: Sequence[Edge]

    def kinds(self) -> Mapping[str, int]:
        """Return the number of nodes of each kind, most frequent first."""
        return dict(Counter(node.kind for node in self.nodes).most_common())

    def kernels(self) -> Mapping[str, int]:
        """Return the number of launches of each kernel, most frequent first."""
        return dict(
            Counter(node.name for node in self.nodes if node.kind == "kernel").most_common()
        )

    def programmatic_edges(self) -> int:
        """Return the number of edges across which launches overlap."""
        return sum(edge.programmatic for edge in self.edges)


def aligned_words(offset: int, data: bytes) -> list[tuple[int, int]]:
    """Return (byte within `data`, value) of the aligned 64-bit words that may be addresses.

    Args:
        offset: of `data` within the memory that decides about alignment: a kernel's parameters lie
            one behind the other in a buffer that is aligned itself.
        data: little-endian, as a GPU reads it.
    """
    first = -offset % 8
    count = max(len(data) - first, 0) // 8
    words = struct.unpack(f"<{count}Q", data[first : first + 8 * count])
    return [
        (first + 8 * index, value)
        for index, value in enumerate(words)
        if _LOWEST_ADDRESS <= value < _HIGHEST_ADDRESS
    ]
