"""What a table of prefill times says: ours against the best peer, and pages against none."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from ..comparison import (
    Cell,
    case_lines,
    compare,
    mean_lines,
    our_names,
    worst_lines,
)
from .cases import (
    DIM,
    Case,
)
from .impls import peers_of

Times = Mapping[Case, Mapping[str, float]]


def _is_plain(case: Case) -> bool:
    """Whether a case is one of whole texts, packed, of one length, with a causal mask alone."""
    return case.is_dense and case.is_square and case.causal and not case.window


# What is asked of the kernels: name -> which cases count.
GROUPS: dict[str, Callable[[Case], bool]] = {
    "all": lambda case: True,
    "causal, head dim 128, texts of 1024 and more": lambda case: (
        _is_plain(case) and case.dim == DIM and case.queries >= 1024
    ),
    "head dims 64 and 256": lambda case: case.dim in (64, 256),
    "in pages": lambda case: case.page > 0,
}


def summary(ours: Times, peers: Times) -> list[str]:
    """Return, in lines, how all times of ours compare with the peers'.

    First every case with the best peer's time and our ratios to it, then TFLOP/s of both, then for
    each of our implementations geometric means by group, the worst cases, and pages against keys
    that lie packed.
    """
    compared = {
        impl: compare(impl, ours, peers, peers_of(impl).__contains__) for impl in our_names(ours)
    }
    lines = case_lines(compared)
    for impl, cells in compared.items():
        lines += ["", f"{impl}, TFLOP/s:", *map(_rate_line, cells)]
        lines += ["", f"{impl} / best peer:", *mean_lines(cells, GROUPS), *worst_lines(cells)]
        lines += _page_lines(impl, ours)
    return lines


def _rate_line(cell: Cell[Case]) -> str:
    mine, theirs = (cell.case.flops / us / 1e6 for us in (cell.us, cell.peer_us))
    return f"  {cell.case!s:<22}{mine:7.0f}, {cell.peer} {theirs:.0f}: {mine / theirs:.3f} of it"


def _page_lines(impl: str, ours: Times) -> list[str]:
    lines = []
    for case in sorted(ours):
        packed = replace(case, page=0)
        if case.page and impl in ours[case] and impl in ours.get(packed, {}):
            ratio = ours[case][impl] / ours[packed][impl]
            lines.append(f"  {case} / {packed}: ×{ratio:.3f}")
    return lines
