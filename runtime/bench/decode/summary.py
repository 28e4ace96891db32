"""What a table of decode times says: ours against the best paged peer."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ..comparison import case_lines, compare, mean_lines, our_names, worst_lines
from .cases import Case
from .impls import is_rival

Times = Mapping[Case, Mapping[str, float]]

_MB = 10**6
# What is asked of the kernels: name -> which cases count. Sizes are those of a 16-bit cache.
GROUPS: dict[str, Callable[[Case], bool]] = {
    "all": lambda case: True,
    "KV below 64 MB": lambda case: case.kv_bytes(2) < 64 * _MB,
    "KV above 512 MB": lambda case: case.kv_bytes(2) > 512 * _MB,
}


def summary(ours: Times, peers: Times) -> list[str]:
    """Return, in lines, how all times of ours compare with the peers'.

    First every case with the best peer's time and our ratios to it, then for each of our
    implementations geometric means by group, and the worst cases.
    """
    compared = {impl: compare(impl, ours, peers, is_rival) for impl in our_names(ours)}
    lines = case_lines(compared)
    for impl, cells in compared.items():
        lines += ["", f"{impl} / best paged peer:", *mean_lines(cells, GROUPS)]
        lines += worst_lines(cells)
    return lines
