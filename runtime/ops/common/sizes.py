"""Division of sizes into tiles."""

from __future__ import annotations


def ceil_div(size: int, tile: int) -> int:
    """Return how many tiles it takes to cover a size."""
    return -(-size // tile)


def round_up(size: int, multiple: int) -> int:
    """Return the next multiple that is at least the size."""
    return ceil_div(size, multiple) * multiple
