"""Buckets: the batch sizes that are captured, and which of them serves a batch."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

from .arguments import as_integer, as_list, at_least_one

# Below 16 rows a tile is not full anyway, and a user waits for every microsecond; up to 128 rows
# the tiles of attention and GEMM double; beyond, work grows by one whole tile of 128 rows.
_SMALL = (1, 2, 4, 8, 16, 32, 64)
_TILE = 128


def default_batch_sizes(max_batch: int) -> tuple[int, ...]:
    """Return 1, 2, 4, 8, then tile boundaries (16, 32, 64, multiples of 128), up to `max_batch`.

    `max_batch` itself is always the last. Rows that pad a batch up to a tile boundary cost next to
    nothing, so buckets between the boundaries would only cost capture time and memory.

    Raises:
        TypeError: when `max_batch` is not an integer.
        ValueError: when it is below 1.
    """
    max_batch = at_least_one("max_batch", max_batch)
    sizes = [*_SMALL, *range(_TILE, max_batch + 1, _TILE)]
    return (*(size for size in sizes if size < max_batch), max_batch)


def check_batch_sizes(
    batch_sizes: Iterable[int], max_batch: int, name: str = "batch_sizes"
) -> tuple[int, ...]:
    """Return the batch sizes, an argument of this name, as a tuple.

    Raises:
        TypeError: when they cannot be iterated.
        ValueError: unless they are integers from 1 to `max_batch`, at least one, strictly
            increasing; the message shows the corrected list.
    """
    got = list(map(_as_plain, as_list(name, batch_sizes)))
    valid = {size for size in got if _is_int(size) and 1 <= size <= max_batch}
    corrected = sorted(valid) or list(default_batch_sizes(max_batch))
    if got != corrected or not all(map(_is_int, got)):
        raise ValueError(
            f"{name}: got {got}, expected at least one integer from 1 to "
            f"max_batch={max_batch}, strictly increasing; corrected: {corrected}"
        )
    return tuple(got)


def smallest_bucket(n: int, batch_sizes: Sequence[int]) -> int:
    """Return the smallest of the increasing `batch_sizes` that holds `n` rows.

    Raises:
        ValueError: when `n` is below 1 or above the largest batch size.
    """
    if not 1 <= n <= batch_sizes[-1]:
        raise ValueError(
            f"n: got {n} rows, expected 1 to {batch_sizes[-1]}, the largest captured batch size; "
            "split a larger batch, or capture a larger size"
        )
    return batch_sizes[bisect_left(batch_sizes, n)]


def _as_plain(value: object) -> Any:
    """Return Python's own number for an integer of any library, and other things as they are."""
    with suppress(TypeError):
        return as_integer("batch_sizes", value)
    return value


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
