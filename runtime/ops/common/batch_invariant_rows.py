"""Library calls on a fixed number of rows, so that a row's result cannot depend on its batch.

On the CPU a row's place among them may steer a library too: MKL adds up the last two of eight rows
in another order than the rest where there is no AVX-512, and every second one for weights of two
or three rows where there is. So `alike_rows` asks for how many rows that is not so.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

# Libraries choose kernels, splits and with them the order of summation by the shape they are
# given. Always showing them this many rows makes a row's bits independent of all other rows.
# A GPU streams the weights in the same time for 1 row or 64; the CPU pays for every padded row.
_ROWS_ON_CUDA = 64
_ROWS_ON_CPU = (8, 4, 2, 1)  # the most that are alike; a row alone always is

_PROBED = 8192  # rows of a weight
_COMPARED = 256  # results of a row; of those in fp32 an other order changes a fourth or more
_alike: dict[tuple[object, ...], int] = {}


def in_row_blocks(
    function: Callable[[torch.Tensor], torch.Tensor],
    x: torch.Tensor,
    out: torch.Tensor,
    rows: int = _ROWS_ON_CUDA,
) -> None:
    """Write function(x) [M, N] into `out`, calling it on zero-padded blocks of rows of x [M, K].

    `function` maps [rows, K] to [rows, N] row by row; its result is rounded to out's dtype. Each
    block is a fresh copy, because the alignment of the operands may steer a library too.
    """
    for start in range(0, x.size(0), rows):
        count = min(rows, x.size(0) - start)
        block = x.new_empty(rows, x.size(1)) if count == rows else x.new_zeros(rows, x.size(1))
        block[:count] = x[start : start + count]
        out[start : start + count] = function(block)[:count]


def alike_rows(w: torch.Tensor, bias: torch.Tensor | None) -> int:
    """Return of how many rows of x [rows, K] the CPU treats all alike in a product with w [N, K].

    That is functional.linear(x, w, bias). It is found out with random numbers, once for each shape
    and dtype of w, with or without a bias, and number of threads: equal rows must have equal
    results. In 16 bits other orders of summation rarely show; there it is oneDNN that multiplies.
    """
    # A weight of very many rows would take its own memory once more, and is no other case.
    columns = min(w.size(0), _PROBED + w.size(0) % _PROBED)
    depth = w.size(1)
    key = (columns, depth, w.dtype, bias is None, torch.get_num_threads())
    if key not in _alike:
        generator = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator, device="cpu").to(w.dtype)

        few = normal(max(1, min(columns, 64)), depth)
        weights = few.repeat(-(-columns // len(few)), 1)[:columns]
        shift = None if bias is None else normal(columns)

        def treats_alike(rows: int) -> bool:
            for _ in range(-(-_COMPARED // max(1, columns))):
                x = normal(1, depth).expand(rows, -1).contiguous()
                results = functional.linear(x, weights, shift)
                if not results.equal(results[:1].expand(rows, -1)):
                    return False
            return True

        _alike[key] = next(rows for rows in _ROWS_ON_CPU if treats_alike(rows))
    return _alike[key]


def mean_square(x: torch.Tensor) -> torch.Tensor:
    """Return the mean of squares of each row of x [M, K] fp32, as [M, 1]."""
    if x.device.type != "cpu":
        # A GPU's sum of a row begins at an address that 16 bytes divide, and so its order would
        # depend on the row's place in the block. Zeros give every row the same alignment.
        aligned = functional.pad(x, (0, -x.size(1) % 4))
        out = x.new_empty(x.size(0), 1)
        in_row_blocks(lambda block: block.square().sum(1, keepdim=True), aligned, out)
        return out / x.size(1)
    # On the CPU torch sums row by row, but splits a long row between threads when it is alone.
    rows = x.expand(2, -1) if x.size(0) == 1 else x
    return rows.square().mean(1, keepdim=True)[: x.size(0)]
