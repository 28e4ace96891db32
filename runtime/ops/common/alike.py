"""Calls of a CPU library that give equal rows equal bits, found by trial.

A library chooses a kernel, and with it an order of summation, by the shape that it is given, and
within one shape perhaps by the place of a row. So a shape is tried once before its results count:
equal rows must come out as they do in a call of a few rows.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Generic, TypeVar

import torch

# Numbers of rows that are multiplied at once. Others are padded to the next of these, or divided.
ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
_FREE = 64  # rows: up to so many a product takes hardly longer than reading its weight
_WASTE = 8  # of more rows at most the eighth part is padding

Shape = TypeVar("Shape", bound=Hashable)


class Alike(Generic[Shape]):
    """The shapes of a product in which each row gets the bits that it gets in a few rows.

    Args:
        trial: returns the results [rows, N] of equal rows in a call of a shape.
        references: shapes, of which the first whose rows are alike says what is right; that of one
            row, the last, always is.
    """

    def __init__(self, trial: Callable[[Shape], torch.Tensor], references: Sequence[Shape]) -> None:
        self._trial = trial
        self._known: dict[Shape, bool] = {}
        for shape in references:
            results = trial(shape)
            self._expected = results[:1]
            self._known[shape] = self._equals_expected(results)
            if self._known[shape]:
                break

    def __call__(self, shape: Shape) -> bool:
        """Return whether rows are right in calls of a shape."""
        found = self._known.get(shape)
        if found is None:
            found = self._known[shape] = self._equals_expected(self._trial(shape))
        return found

    def _equals_expected(self, results: torch.Tensor) -> bool:
        return results.equal(self._expected.expand_as(results))


def pieces(
    rows: int, alike: Callable[[int], bool], *, most: int = ROWS[-1]
) -> Iterator[tuple[int, int, int]]:
    """Yield (start, stop, size) of pieces of so many rows: each is computed as one of `size` rows.

    It is padded where it has fewer. Sizes are `alike`, one at least, and up to `most`, if any is.
    """
    sizes = [size for size in ROWS if size <= most]
    start = 0
    while start < rows:
        left = rows - start
        size = _size(left, sizes, alike)
        stop = min(rows, start + size)
        yield start, stop, size
        start = stop


def _size(rows: int, sizes: Sequence[int], alike: Callable[[int], bool]) -> int:
    waste = rows if rows <= _FREE else rows // _WASTE
    for size in sizes:
        if 0 <= size - rows <= waste and alike(size):
            return size
    for size in reversed(sizes):
        if size <= rows and alike(size):
            return size
    # Only calls of more rows than there are are alike.
    return next(size for size in ROWS if alike(size))


def cancelling(
    depth: int, columns: int, dtype: torch.dtype, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a row [1, depth] and a weight [columns, depth] whose exact products are near 0.

    What a sum of such products leaves is its rounding errors: so each order of summation has other
    results, even if they are rounded to 16 bits. Up to 64 rows of the weight are different ones.
    """
    generator = torch.Generator(device="cpu").manual_seed(seed)
    half = depth // 2
    order = torch.randperm(depth, generator=generator, device="cpu")

    def drawn(rows: int, sign: float) -> torch.Tensor:
        numbers = torch.randn(rows, half, generator=generator, device="cpu")
        rest = torch.randn(rows, depth - 2 * half, generator=generator, device="cpu")
        return torch.cat([numbers, sign * numbers, rest], dim=1)[:, order].to(dtype)

    x, few = drawn(1, 1.0), drawn(max(1, min(columns, 64)), -1.0)
    return x, few.repeat(-(-columns // len(few)), 1)[:columns]
