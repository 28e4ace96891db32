"""What a table of GEMM times says: ours against the best W8A8 peer, and where more is faster."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import groupby, pairwise

from ..comparison import (
    case_lines,
    compare,
    mean,
    mean_lines,
    our_names,
    worst_lines,
)
from .cases import (
    SHAPE_GROUPS,
    Case,
)
from .impls import W8A8_PEERS

Times = Mapping[Case, Mapping[str, float]]

# A time that drops by more when m grows is a cliff: computing more tokens would be faster.
MONOTONE_WITHIN = 1.05

# What is asked of the kernels: name -> which cases count.
GROUPS: dict[str, Callable[[Case], bool]] = {
    "all": lambda case: True,
    "llama-8b, M <= 16": lambda case: case.shape in SHAPE_GROUPS["llama-8b"] and case.m <= 16,
    "M > 1024": lambda case: case.m > 1024,
}


def cliffs(impl: str, ours: Times) -> list[tuple[Case, Case]]:
    """Return pairs of neighbours in m of which the larger one is clearly faster."""
    found = []
    having = sorted((c for c in ours if impl in ours[c]), key=lambda c: (c.shape, c.m))
    for _, of_shape in groupby(having, lambda case: case.shape):
        for smaller, larger in pairwise(of_shape):
            if ours[smaller][impl] > MONOTONE_WITHIN * ours[larger][impl]:
                found.append((smaller, larger))
    return found


def summary(ours: Times, peers: Times) -> list[str]:
    """Return, in lines, how all times of ours compare with the peers'.

    First every case with the best peer's time and our ratios to it, then for each of our
    implementations geometric means by group and by m, the worst cases, and the cliffs.
    """
    compared = {
        impl: compare(impl, ours, peers, W8A8_PEERS.__contains__) for impl in our_names(ours)
    }
    lines = case_lines(compared)
    for impl, cells in compared.items():
        lines += ["", f"{impl} / best W8A8 peer:", *mean_lines(cells, GROUPS)]
        for m in sorted({cell.case.m for cell in cells}):
            lines.append(f"  M = {m}: {mean([cell for cell in cells if cell.case.m == m])}")
        lines += worst_lines(cells)
        lines += [
            f"  cliff: {before} {ours[before][impl]:.2f} µs, M{after.m} {ours[after][impl]:.2f} µs"
            for before, after in cliffs(impl, ours)
        ]
    return lines
