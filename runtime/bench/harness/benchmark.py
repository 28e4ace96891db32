"""The parts of a benchmark of kernels: cases, implementations, inputs, a check, a summary."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from typing import Any, Generic, Protocol, TypeVar

import torch

from .check import Check
from .rotation import Call
from .summary import OURS, Summary


class Case(Protocol):
    """A computation. `str` spells it as the rows do; it has an order and a hash."""

    @property
    def flops(self) -> int:
        """Operations of the algorithm, for the roofline."""

    def __lt__(self, other: Any, /) -> bool: ...
    def __hash__(self) -> int: ...


class InputSet(Protocol):
    """The tensors that one launch reads and writes."""

    @property
    def out(self) -> torch.Tensor:
        """The output, which is filled with NaN before a result is checked."""


CaseT = TypeVar("CaseT", bound=Case)
SetT = TypeVar("SetT", bound=InputSet)
# By layout: the sets of inputs that are timed side by side.
Group = Mapping[Hashable, Sequence[SetT]]
Inputs = Callable[
    [Sequence[CaseT], Sequence[Hashable], torch.device],
    Iterator[tuple[CaseT, Iterator[Group[SetT]]]],
]


def _takes_all(case: object) -> None:
    return None


def _no_floor(case: object, layout: object, device: torch.device) -> None:
    return None


@dataclass(frozen=True)
class Implementation(Generic[CaseT, SetT]):
    """A way to compute the cases of a benchmark.

    Args:
        name: as the rows call it; ours begin with "ostinato_".
        layout: which inputs it reads (page size, dtype); those with one layout share inputs.
        bind: returns one call per set of inputs, ready to be captured; it may plan on the host
            what will not change. Raises `ValueError`, `RuntimeError` or `OSError` for a case that
            it does not take.
        refuses: says, before inputs are touched, why it does not take a case; None if it does.
        prepare: loads what it needs; raises `ImportError` or `OSError` where it is not installed.
        package: the distribution whose version the document records.
    """

    name: str
    layout: Any
    bind: Callable[[CaseT, Sequence[SetT]], Sequence[Call]]
    refuses: Callable[[CaseT], str | None] = _takes_all
    prepare: Callable[[], object] = lambda: None
    package: str | None = None

    @property
    def is_ours(self) -> bool:
        return self.name.startswith(OURS)

    @property
    def version(self) -> str | None:
        """Version of the package; None where there is none, or it is not installed as one."""
        try:
            return None if self.package is None else metadata.version(self.package)
        except metadata.PackageNotFoundError:
            return None


@dataclass(frozen=True)
class Benchmark(Generic[CaseT, SetT]):
    """A benchmark.

    Args:
        section: its name in rows and on the command line.
        parse: returns the case that a row spells; raises `ValueError` for other text.
        inputs: yields the cases one after the other, each with groups of inputs. What is in one
            group is timed side by side; a group is freed before the next one is made.
        check: of results.
        num_bytes: unique bytes that a case reads and writes in a layout.
        summary: how our times are compared with the peers'.
        peers: names of the known peers, in the order in which they are timed: torch's operators as
            implementations, others as the file name of their adapter.
        floor: the shortest time in seconds that the device allows a case in a layout, for our rows;
            None where it is not known.
    """

    section: str
    parse: Callable[[str], CaseT]
    inputs: Inputs[CaseT, SetT]
    check: Check[CaseT, SetT]
    num_bytes: Callable[[CaseT, Any], int]
    summary: Summary[CaseT]
    peers: Mapping[str, Implementation[CaseT, SetT] | str]
    floor: Callable[[CaseT, Any, torch.device], float | None] = _no_floor


def each(
    call: Callable[[SetT], torch.Tensor],
) -> Callable[[Any, Sequence[SetT]], list[Callable[[], torch.Tensor]]]:
    """Return a `bind` for a call that needs nothing but a set of inputs."""
    return lambda case, sets: [partial(call, one) for one in sets]


def one_layout_at_a_time(
    make: Callable[[CaseT, Any, torch.device], Sequence[SetT]],
) -> Inputs[CaseT, SetT]:
    """Return inputs of which no two layouts lie in memory together.

    Args:
        make: returns the sets of a case in a layout.
    """

    def inputs(
        cases: Sequence[CaseT], layouts: Sequence[Hashable], device: torch.device
    ) -> Iterator[tuple[CaseT, Iterator[Group[SetT]]]]:
        for case in cases:
            yield case, _groups(case, layouts, device)
            if device.type == "cuda":
                torch.cuda.empty_cache()  # the inputs, and the pools of this case's graphs

    def _groups(
        case: CaseT, layouts: Sequence[Hashable], device: torch.device
    ) -> Iterator[Group[SetT]]:
        for layout in layouts:
            yield {layout: make(case, layout, device)}

    return inputs
