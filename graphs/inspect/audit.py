"""The audit of captured graphs: nodes that do not belong in one, addresses that may not last.

A graph repeats the addresses that it was captured with. Each address in it must lie in memory that
stays where it is for as long as the graph is replayed; `docs/graphs/capture.md` says what can be
missed.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from ..buffers import StaticBuffers
from ..declared_memory import DeclaredMemory, stored, tensors_of
from .allocations import Allocation, Allocations, State, mapped_by_host
from .inspector import Inspector
from .nodes import GraphNodes, Word

Audit = Literal["off", "report", "strict"]
AUDITS: tuple[Audit, ...] = ("off", "report", "strict")

_FORBIDDEN = {
    "host": "calls a function of the host, which every replay would wait for",
    "allocation": "allocates memory of its own, outside of the graphs' pool",
    "free": "frees memory",
    "event record": "records an event that others may wait for",
    "event wait": "waits for an event of somebody else",
    "semaphore signal": "signals a semaphore of somebody else",
    "semaphore wait": "waits for a semaphore of somebody else",
}
# An attribute of tensors: true of memory that a library keeps for as long as the graphs live that
# read it, such as workspaces of captured kernels. An audit cannot tell by itself: where memory has
# been freed since the captures began, an address that is new looks old.
KEPT_BY_LIBRARY = "kept_for_graphs"
_NO_MEMORY = "looks like an address of the device, where no memory is"
_SHOWN = 5  # kinds of findings in a message


@dataclass(frozen=True)
class Finding:
    """A property of a captured graph that may make a replay wrong.

    Attributes:
        node: its index in the graph.
        name: what it is: the kind of node, and the kernel.
        problem: what is wrong, without addresses, so that repeated findings read the same.
        address: which address is meant; None for a problem of another kind.
        refused: whether a strict audit refuses the graph for it. False for bits of a kernel's
            parameters that only look like an address, where no memory is.
    """

    node: int
    name: str
    problem: str
    address: int | None = None
    refused: bool = True

    def __str__(self) -> str:
        """Return all of it on one line."""
        at = "" if self.address is None else f" ({self.address:#x})"
        return f"node {self.node}, {self.name}: {self.problem}{at}"


class Auditor:
    """Audits the graphs of a runner, one series of captures after the other.

    Args:
        inspector: reads the graphs and the memory they use.
        buffers: the static buffers, which stay.
        memory: what else stays, by name. If it is given, any other tensor is found, except for
            what the captures made and kept, as state made at the first call, and what libraries
            keep (`KEPT_BY_LIBRARY`). If not, every live tensor is taken for the step's own, whoever
            allocated its memory.
    """

    def __init__(
        self, inspector: Inspector, buffers: StaticBuffers, memory: DeclaredMemory | None
    ) -> None:
        self._inspector = inspector
        self._buffers = buffers
        self._memory = memory
        self._before: frozenset[int] = frozenset()
        self._made: frozenset[int] = frozenset()
        self._known: Allocations | None = None
        self._present = Allocations(())
        self._host = Allocations(())
        self._foreign: Allocations | None = None
        self._of_libraries: Allocations | None = None
        self._problems: dict[tuple[int, bool], str | None] = {}

    def begin(self) -> None:
        """Note which tensors there are before the warm-up of a series of captures."""
        live = _live(self._inspector.allocations())
        self._made &= live
        self._before = live - self._made
        self._known = self._foreign = self._of_libraries = None
        self._problems = {}

    def find(self, nodes: GraphNodes) -> tuple[Finding, ...]:
        """Return what is wrong with a captured graph, in the order of its nodes.

        All graphs of a series of captures must have been captured before the first is audited.
        """
        found = []
        for index, node in enumerate(nodes.nodes):
            name = str(node)
            for problem in (_FORBIDDEN.get(node.kind), node.unread):
                if problem:
                    found.append(Finding(index, name, problem))
            for word in node.words:
                problem = self._problem_of(word)
                if problem is not None:
                    refused = problem != _NO_MEMORY
                    where = f"{word.place} {problem}"
                    found.append(Finding(index, name, where, word.value, refused))
        return tuple(found)

    def _problem_of(self, word: Word) -> str | None:
        key = (word.value, word.is_address)
        if key not in self._problems:  # layers repeat their addresses, and graphs each other's
            self._problems[key] = self._examine(word)
        return self._problems[key]

    def _examine(self, word: Word) -> str | None:
        known = self._allocations().find(word.value)
        if known is None:
            return self._examine_foreign(word)
        if known.state is State.FREED:
            return f"is in freed memory: {known.label}"
        undeclared = known.state is State.LIVE and self._memory is not None
        if not undeclared or known.start in self._made:
            return None
        if self._kept_by_libraries().find(word.value) is not None:
            return None
        return f"is in memory that was not declared: {known.label}"

    def _allocations(self) -> Allocations:
        if self._known is None:
            present = self._inspector.allocations()
            self._made |= _live(present) - self._before
            buffers = self._buffers.view(self._buffers.max_batch)
            kept = [range_of(buffers[name], f"buffer {name!r}") for name in self._buffers.specs]
            kept.append(range_of(buffers.n_active, "buffer 'n_active'"))
            declared = [
                range_of(tensor, f"memory[{name!r}]")
                for name, holder in (self._memory or {}).items()
                for whole in tensors_of(name, holder)
                for tensor in stored(whole)
            ]
            self._known = Allocations([*kept, *declared, *present])
            # Declared memory of another allocator may be anywhere, far from all other.
            self._present = Allocations(present)
            self._host = Allocations(mapped_by_host())
        return self._known

    def _examine_foreign(self, word: Word) -> str | None:
        """Examine an address that torch's allocator does not have, or a number that is none."""
        location = self._inspector.location_of(word.value)
        if location == "the host":
            return "is in pinned memory of the host that was not declared"
        if location is not None:
            if self._memory is None and self._on_the_device().find(word.value) is not None:
                return None
            return f"is in memory on {location} that torch did not allocate and nobody declared"
        if word.is_address:
            return "is in pageable memory of the host, or in memory that has been given back"
        looks_like_one = self._present.spans(word.value)
        return _NO_MEMORY if looks_like_one and self._host.find(word.value) is None else None

    def _on_the_device(self) -> Allocations:
        if self._foreign is None:
            device = self._buffers.device
            with torch._C.DisableTorchFunctionSubclass():
                ranges = [_range_if_any(tensor, device) for tensor in _live_tensors()]
            self._foreign = Allocations(found for found in ranges if found is not None)
        return self._foreign

    def _kept_by_libraries(self) -> Allocations:
        if self._of_libraries is None:
            with torch._C.DisableTorchFunctionSubclass():
                kept = [t for t in _live_tensors() if t.__dict__.get(KEPT_BY_LIBRARY)]
                self._of_libraries = Allocations(range_of(t, "a library's memory") for t in kept)
        return self._of_libraries


def _live_tensors() -> list[torch.Tensor]:
    return [found for found in gc.get_objects() if issubclass(type(found), torch.Tensor)]


def range_of(tensor: torch.Tensor, label: str) -> Allocation:
    """Return the range of a tensor's whole storage, which views of it share."""
    storage = tensor.untyped_storage()
    return Allocation(storage.data_ptr(), storage.nbytes(), label)


def _range_if_any(tensor: torch.Tensor, device: torch.device) -> Allocation | None:
    try:
        return range_of(tensor, "a tensor") if tensor.device == device else None
    except RuntimeError:  # a sparse tensor, one that stands for others
        return None


def summarize(findings: Sequence[Finding]) -> str:
    """Return the most frequent findings, a line each, repeated ones once with their number."""
    counts = Counter((finding.name, finding.problem) for finding in findings).most_common()
    first = {}
    for finding in reversed(findings):
        first[finding.name, finding.problem] = finding
    lines = [
        f"{first[key]}" + (f", and {count - 1} more such" if count > 1 else "")
        for key, count in counts[:_SHOWN]
    ]
    if len(counts) > _SHOWN:
        lines.append(f"and {len(counts) - _SHOWN} others")
    return "\n".join(lines)


def _live(allocations: Iterable[Allocation]) -> frozenset[int]:
    return frozenset(a.start for a in allocations if a.state is State.LIVE)
