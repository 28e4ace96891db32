"""Library calls on a fixed number of rows, so that a row's result cannot depend on its batch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

# Libraries choose kernels, splits and with them the order of summation by the shape they are
# given. Always showing them this many rows makes a row's bits independent of all other rows.
# A GPU streams the weights in the same time for 1 row or 64. The CPU would pay for every padded
# row: see `alike` and `linear.cpu_product`.
_ROWS = 64


def in_row_blocks(
    function: Callable[[torch.Tensor], torch.Tensor],
    x: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Write function(x) [M, N] into `out`, calling it on zero-padded blocks of rows of x [M, K].

    `function` maps [64, K] to [64, N] row by row; its result is rounded to out's dtype. Each
    block is a fresh copy, because the alignment of the operands may steer a library too.
    """
    for start in range(0, x.size(0), _ROWS):
        count = min(_ROWS, x.size(0) - start)
        block = x.new_empty(_ROWS, x.size(1)) if count == _ROWS else x.new_zeros(_ROWS, x.size(1))
        block[:count] = x[start : start + count]
        out[start : start + count] = function(block)[:count]


def mean(x: torch.Tensor) -> torch.Tensor:
    """Return the mean of each row of x [M, K] fp32, as [M, 1]."""
    if x.device.type != "cpu":
        # A GPU's sum of a row begins at an address that 16 bytes divide, and so its order would
        # depend on the row's place in the block. Zeros give every row the same alignment.
        aligned = functional.pad(x, (0, -x.size(1) % 4))
        out = x.new_empty(x.size(0), 1)
        in_row_blocks(lambda block: block.sum(1, keepdim=True), aligned, out)
        return out / x.size(1)
    # On the CPU torch sums row by row, but splits a long row between threads when it is alone.
    rows = x.expand(2, -1) if x.size(0) == 1 else x
    return rows.mean(1, keepdim=True)[: x.size(0)]


def mean_square(x: torch.Tensor) -> torch.Tensor:
    """Return the mean of squares of each row of x [M, K] fp32, as [M, 1]."""
    return mean(x.square())
