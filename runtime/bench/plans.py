"""Checks shared by the plans of several benchmarks."""

from __future__ import annotations

from collections.abc import Iterable


def check_least(numbers: Iterable[tuple[str, int, int]]) -> None:
    """Refuse numbers that are too small.

    Args:
        numbers: name, value and the least it may be.

    Raises:
        ValueError: for the first that is too small.
    """
    for name, value, minimum in numbers:
        if value < minimum:
            raise ValueError(f"{name}: got {value}, expected at least {minimum}")
