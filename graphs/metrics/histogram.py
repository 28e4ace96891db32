"""A histogram of times, on bounds that grow by about a factor of two."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

# 1, 2, 5 and so on, from 10 µs to half a second.
BOUNDS_US = tuple(10.0**power * step for power in range(1, 6) for step in (1, 2, 5))


@dataclass(frozen=True)
class Histogram:
    """Times in microseconds.

    Attributes:
        bounds: inclusive upper bounds of the classes.
        counts: how many times fell into each, and one more for those above all bounds.
        total: sum of the times.
        missed: how many were not taken, since earlier ones were not known yet.
    """

    bounds: tuple[float, ...] = BOUNDS_US
    counts: tuple[int, ...] = (0,) * (len(BOUNDS_US) + 1)
    total: float = 0.0
    missed: int = 0

    @property
    def count(self) -> int:
        """How many times there are."""
        return sum(self.counts)

    @property
    def mean(self) -> float:
        """Their mean; 0 when there are none."""
        return self.total / self.count if self.count else 0.0


class HistogramBuilder:
    """Counts times."""

    def __init__(self) -> None:
        self._counts = [0] * (len(BOUNDS_US) + 1)
        self._total = 0.0
        self.missed = 0

    def add(self, microseconds: float) -> None:
        """Add one."""
        self._counts[bisect_left(BOUNDS_US, microseconds)] += 1
        self._total += microseconds

    def build(self) -> Histogram:
        """Return what was counted so far."""
        return Histogram(BOUNDS_US, tuple(self._counts), self._total, self.missed)
