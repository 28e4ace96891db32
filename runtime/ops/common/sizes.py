"""Division of sizes into tiles, and rounding."""

from __future__ import annotations


def ceil_div(size: int, tile: int) -> int:
    """Return how many tiles it takes to cover a size."""
    return -(-size // tile)


def round_up(size: int, multiple: int) -> int:
    """Return the next multiple that is at least the size."""
    return ceil_div(size, multiple) * multiple


def power_of_two(size: int) -> int:
    """Return the least power of two that is at least the size, 1 for 0."""
    return 1 << max(size - 1, 0).bit_length()
