"""Our times against the fastest peer's, case by case and on average, for any benchmark."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from ..report import Row
from ..shapes import is_16_bit_twin

if TYPE_CHECKING:
    from ..report import AnyRow

OURS = "ostinato_"  # begins the names of our implementations
_WORST = 5


class _Ordered(Protocol):
    def __lt__(self, other: Any, /) -> bool: ...
    def __hash__(self) -> int: ...


CaseT = TypeVar("CaseT", bound=_Ordered)
RowT = TypeVar("RowT", bound=Row)
Times = Mapping[CaseT, Mapping[str, float]]  # microseconds by case and implementation


def _no_details(impl: str, times: object) -> list[str]:
    return []


@dataclass(frozen=True)
class Summary(Generic[CaseT]):
    """The comparison of our times in a benchmark with the peers'.

    Args:
        peer: what the headings call a peer, such as "paged peer".
        rivals: whether an implementation of ours (first) is compared with another name (second).
        groups: cases that have a mean of their own, by the group's name.
        label: returns the label of the mean that a case belongs to as well.
        rates: returns a line with the rates of a cell, listed before the means.
        details: returns lines for one of our implementations, listed after its worst cases.
    """

    peer: str
    rivals: Callable[[str, str], bool]
    groups: Mapping[str, Callable[[CaseT], bool]] = field(
        default_factory=lambda: {"all": lambda case: True}
    )
    label: Callable[[CaseT], str] | None = None
    rates: Callable[[Cell[CaseT]], str] | None = None
    details: Callable[[str, Times[CaseT]], list[str]] = _no_details

    def lines(self, ours: Times[CaseT], peers: Times[CaseT]) -> list[str]:
        """Return, in lines, how all times of ours compare with the peers'.

        First every case with the best peer's time and our ratios to it; then, for each of our
        implementations, geometric means by group and the worst cases.
        """
        compared = {
            impl: compare(impl, ours, peers, partial(self.rivals, impl)) for impl in our_names(ours)
        }
        lines = case_lines(compared)
        for impl, cells in compared.items():
            if self.rates is not None:
                lines += ["", f"{impl}, TFLOP/s:", *map(self.rates, cells)]
            lines += ["", f"{impl} / best {self.peer}:", *mean_lines(cells, self.groups)]
            if self.label is not None:
                lines += _label_lines(cells, self.label)
            lines += [*worst_lines(cells), *self.details(impl, ours)]
        return lines


@dataclass(frozen=True)
class Cell(Generic[CaseT]):
    """One of our times in one case, and the fastest peer's there, in microseconds."""

    case: CaseT
    us: float
    peer: str
    peer_us: float

    @property
    def ratio(self) -> float:
        """Our time relative to the peer's: below 1 is faster."""
        return self.us / self.peer_us


def with_peers(rows: Sequence[RowT], rivals: Callable[[str, str], bool]) -> list[RowT]:
    """Return the rows, ours with the fastest peer of the same case and our time over its.

    Args:
        rows: of one run; those of one section are compared.
        rivals: whether an implementation of ours (first) is compared with another name (second).
    """
    of_case: dict[tuple[str, str], dict[str, float]] = {}
    for row in rows:
        of_case.setdefault((row.section, row.case), {})[row.impl] = row.us
    found = []
    for row in rows:
        if row.impl.startswith(OURS):
            best = _fastest(of_case[row.section, row.case], partial(rivals, row.impl))
            if best is not None:
                peer, us = best
                row = replace(row, peer=peer, ratio=float(f"{row.us / us:.4g}"))
        found.append(row)
    return found


def compared_models(rows: Sequence[AnyRow]) -> list[AnyRow]:
    """Return the rows of whole models, ours with the fastest peer of the same case.

    Peers are implementations of others and, of ours over an 8-bit KV cache, ours over 16 bits.
    """

    def rivals(ours: str, name: str) -> bool:
        return not name.startswith(OURS) or is_16_bit_twin(ours, name)

    compared = iter(with_peers([row for row in rows if isinstance(row, Row)], rivals))
    return [next(compared) if isinstance(row, Row) else row for row in rows]


def times(rows: Iterable[Row], parse: Callable[[str], CaseT]) -> dict[CaseT, dict[str, float]]:
    """Return the microseconds in rows of one benchmark, by case and implementation."""
    found: dict[CaseT, dict[str, float]] = {}
    for row in rows:
        found.setdefault(parse(row.case), {})[row.impl] = row.us
    return found


def read_targets(
    path: Path, section: str, parse: Callable[[str], CaseT]
) -> dict[CaseT, dict[str, float]]:
    """Return the peers' times in a file of published ones (its rows say "peer", not "impl").

    Raises:
        OSError, ValueError: when it cannot be read, or holds no such document.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        found: dict[CaseT, dict[str, float]] = {}
        for row in document["rows"]:
            if row["section"] == section:
                found.setdefault(parse(row["case"]), {})[row["peer"]] = float(row["us"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: not a document of peers' times: {error!r}") from error
    return found


def compare(
    impl: str,
    ours: Mapping[CaseT, Mapping[str, float]],
    peers: Mapping[CaseT, Mapping[str, float]],
    rivals: Callable[[str], bool],
) -> list[Cell[CaseT]]:
    """Return a cell for every case that `impl` and at least one peer that counts have a time for.

    Args:
        impl: one of our implementations.
        ours: our times.
        peers: theirs; other names may be among them.
        rivals: whether a name is of a peer that counts.
    """
    cells = []
    for case, of_case in ours.items():
        best = _fastest(peers.get(case, {}), rivals)
        if impl in of_case and best is not None:
            cells.append(Cell(case, of_case[impl], *best))
    return cells


def _fastest(
    of_case: Mapping[str, float], rivals: Callable[[str], bool]
) -> tuple[str, float] | None:
    """Return the fastest peer that counts and its time, None where there is none."""
    known = {name: us for name, us in of_case.items() if rivals(name)}
    return min(known.items(), key=itemgetter(1), default=None)


def our_names(measured: Mapping[CaseT, Mapping[str, float]]) -> list[str]:
    """Return the names of our implementations in these times, in the order of their appearance."""
    names = dict.fromkeys(impl for of_case in measured.values() for impl in of_case)
    return [name for name in names if name.startswith(OURS)]


def geometric_mean(values: Sequence[float]) -> float:
    """Return the geometric mean.

    Raises:
        ValueError: for no values.
    """
    if not values:
        raise ValueError("values: got none, expected at least one")
    return math.exp(math.fsum(map(math.log, values)) / len(values))


def case_lines(compared: Mapping[str, Sequence[Cell[CaseT]]]) -> list[str]:
    """Return a line for every case: the best peer's time, and ours relative to it."""
    of_case: dict[CaseT, dict[str, Cell[CaseT]]] = {}
    for impl, cells in compared.items():
        for cell in cells:
            of_case.setdefault(cell.case, {})[impl] = cell
    columns = {impl: max(len(impl), 15) for impl in compared}
    head = "".join(f"  {impl:>{width}}" for impl, width in columns.items())
    lines = [f"{'case':<24}{'best peer':<9}{'µs':>9}{head}"]
    for case in sorted(of_case):
        found = of_case[case]
        best = next(iter(found.values()))
        texts = {impl: f"{cell.us:.2f} ×{cell.ratio:.3f}" for impl, cell in found.items()}
        row = "".join(f"  {texts.get(impl, '-'):>{width}}" for impl, width in columns.items())
        lines.append(f"{case!s:<24}{best.peer:<9}{best.peer_us:>9.2f}{row}")
    return lines


def mean_lines(
    cells: Sequence[Cell[CaseT]], groups: Mapping[str, Callable[[CaseT], bool]]
) -> list[str]:
    """Return geometric means and the worst case of each group that has cases, in lines."""
    lines = []
    for name, belongs in groups.items():
        group = [cell for cell in cells if belongs(cell.case)]
        if group:
            lines.append(f"  {name}: {mean(group)}, {len(group)} cases")
    return lines or ["  nothing to compare"]


def _label_lines(cells: Sequence[Cell[CaseT]], label: Callable[[CaseT], str]) -> list[str]:
    by_label: dict[str, list[Cell[CaseT]]] = {}
    for cell in sorted(cells, key=lambda cell: cell.case):
        by_label.setdefault(label(cell.case), []).append(cell)
    return [f"  {name}: {mean(group)}" for name, group in by_label.items()]


def mean(cells: Sequence[Cell[CaseT]]) -> str:
    """Return the geometric mean of the cells' ratios, and the largest, as text."""
    ratios = [cell.ratio for cell in cells]
    return f"×{geometric_mean(ratios):.3f}, at most ×{max(ratios):.3f}"


def worst_lines(cells: Sequence[Cell[CaseT]]) -> list[str]:
    """Return the cases in which we are the slowest relative to the best peer."""
    worst = sorted(cells, key=lambda cell: cell.ratio, reverse=True)[:_WORST]
    return [f"  worst: {cell.case} ×{cell.ratio:.3f} of {cell.peer}" for cell in worst]
