"""What a table of GEMM times says: ours against the best peer, cell by cell and on average."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path

from ostinato.bench.gemm_cases import SHAPE_GROUPS, Case
from ostinato.bench.gemm_impls import OURS, W8A8_PEERS
from ostinato.bench.report import Row

Times = Mapping[Case, Mapping[str, float]]

# A time that drops by more when m grows is a cliff: computing more tokens would be faster.
MONOTONE_WITHIN = 1.05
_WORST = 5


@dataclass(frozen=True)
class Cell:
    """One of our times in one case, and the fastest peer's there, in microseconds."""

    case: Case
    us: float
    peer: str
    peer_us: float

    @property
    def ratio(self) -> float:
        """Our time relative to the peer's: below 1 is faster."""
        return self.us / self.peer_us


def times(rows: Iterable[Row]) -> dict[Case, dict[str, float]]:
    """Return the microseconds in rows of this benchmark, by case and implementation."""
    found: dict[Case, dict[str, float]] = {}
    for row in rows:
        found.setdefault(Case.parse(row.case), {})[row.impl] = row.us
    return found


def read_targets(path: Path) -> dict[Case, dict[str, float]]:
    """Return the peers' times in a file of published ones (its rows say "peer", not "impl").

    Raises:
        OSError, ValueError: when it cannot be read, or holds no such document.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        found: dict[Case, dict[str, float]] = {}
        for row in document["rows"]:
            if row["section"] == "gemm":
                found.setdefault(Case.parse(row["case"]), {})[row["peer"]] = float(row["us"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: not a document of peers' times: {error!r}") from error
    return found


def compare(impl: str, ours: Times, peers: Times) -> list[Cell]:
    """Return a cell for every case that `impl` and at least one W8A8 peer have a time for."""
    cells = []
    for case, of_case in ours.items():
        known = peers.get(case, {})
        rivals = {peer: known[peer] for peer in W8A8_PEERS if peer in known}
        if impl in of_case and rivals:
            best = min(rivals, key=rivals.__getitem__)
            cells.append(Cell(case, of_case[impl], best, rivals[best]))
    return cells


def geometric_mean(values: Sequence[float]) -> float:
    """Return the geometric mean.

    Raises:
        ValueError: for no values.
    """
    if not values:
        raise ValueError("values: got none, expected at least one")
    return math.exp(math.fsum(map(math.log, values)) / len(values))


def cliffs(impl: str, ours: Times) -> list[tuple[Case, Case]]:
    """Return pairs of neighbours in m of which the larger one is clearly faster."""
    found = []
    having = sorted((c for c in ours if impl in ours[c]), key=lambda c: (c.shape, c.m))
    for _, of_shape in groupby(having, lambda case: case.shape):
        for smaller, larger in pairwise(of_shape):
            if ours[smaller][impl] > MONOTONE_WITHIN * ours[larger][impl]:
                found.append((smaller, larger))
    return found


# What is asked of the kernels: name -> which cases count.
GROUPS: dict[str, Callable[[Case], bool]] = {
    "all": lambda case: True,
    "llama-8b, M <= 16": lambda case: case.shape in SHAPE_GROUPS["llama-8b"] and case.m <= 16,
    "M > 1024": lambda case: case.m > 1024,
}


def summary(ours: Times, peers: Times) -> list[str]:
    """Return, in lines, how all times of ours compare with the peers'.

    First every case with the best peer's time and our ratios to it, then for each of our
    implementations geometric means by group and by m, the worst cases, and the cliffs.
    """
    names = dict.fromkeys(impl for of_case in ours.values() for impl in of_case)
    impls = [name for name in names if name.startswith(OURS)]
    compared = {impl: compare(impl, ours, peers) for impl in impls}
    lines = _case_lines(compared)
    for impl, cells in compared.items():
        lines += ["", f"{impl} / best W8A8 peer:", *_mean_lines(cells)]
        lines += [
            f"  cliff: {before} {ours[before][impl]:.2f} µs, M{after.m} {ours[after][impl]:.2f} µs"
            for before, after in cliffs(impl, ours)
        ]
    return lines


def _case_lines(compared: Mapping[str, Sequence[Cell]]) -> list[str]:
    of_case: dict[Case, dict[str, Cell]] = {}
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


def _mean_lines(cells: Sequence[Cell]) -> list[str]:
    if not cells:
        return ["  nothing to compare"]
    lines = []
    for name, belongs in GROUPS.items():
        group = [cell for cell in cells if belongs(cell.case)]
        if group:
            lines.append(f"  {name}: {_mean(group)}, {len(group)} cases")
    for m in sorted({cell.case.m for cell in cells}):
        lines.append(f"  M = {m}: {_mean([cell for cell in cells if cell.case.m == m])}")
    worst = sorted(cells, key=lambda cell: cell.ratio, reverse=True)[:_WORST]
    return [*lines, *(f"  worst: {cell.case} ×{cell.ratio:.3f} of {cell.peer}" for cell in worst)]


def _mean(cells: Sequence[Cell]) -> str:
    ratios = [cell.ratio for cell in cells]
    return f"×{geometric_mean(ratios):.3f}, at most ×{max(ratios):.3f}"
