"""Flags that `bench gemm` and `tune` share."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterable

from ostinato.cli.command import UserError

_DTYPES = ("int8", "fp8")


def add_dtype_flag(parser: argparse.ArgumentParser) -> None:
    """Add --dtype."""
    parser.add_argument(
        "--dtype",
        nargs="+",
        default=list(_DTYPES),
        choices=_DTYPES,
        help="of our operands (default: both)",
    )


def add_budget_flag(parser: argparse.ArgumentParser, what: str) -> None:
    """Add --budget-s, after which no `what` is started."""
    parser.add_argument(
        "--budget-s", type=float, metavar="S", help=f"start no {what} that would end later"
    )


def check_tokens(tokens: Iterable[int]) -> None:
    """Check the values of --m."""
    for m in tokens:
        if m < 1:
            raise UserError(f"--m: got {m}, expected at least 1")


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
