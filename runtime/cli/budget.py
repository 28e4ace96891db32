"""`--budget-s`: measurements that end in time."""

from __future__ import annotations

import argparse
import math
import time

from .command import UserError


def add_budget_flag(parser: argparse.ArgumentParser, what: str) -> None:
    """Add --budget-s, after which no `what` is started."""
    parser.add_argument(
        "--budget-s", type=float, metavar="S", help=f"start no {what} that would end later"
    )


class Budget:
    """Time for pieces of work, each of which may take as long as the longest before it.

    Args:
        seconds: of --budget-s; None for no end.
        started: `time.monotonic()` when they began to count.
    """

    def __init__(self, seconds: float | None, started: float) -> None:
        if seconds is not None and not seconds > 0:
            raise UserError(f"--budget-s: got {seconds:g}, expected more than 0")
        self._ends = math.inf if seconds is None else started + seconds
        self._longest = 0.0
        self._begun: float | None = None

    def allows_another(self) -> bool:
        """Return whether the next piece, which begins now, is likely to end in time."""
        now = time.monotonic()
        if self._begun is not None:
            self._longest = max(self._longest, now - self._begun)
        self._begun = now
        return now + self._longest <= self._ends
