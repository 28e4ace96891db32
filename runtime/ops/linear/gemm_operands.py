"""Matrices as the GEMM kernels read them by TMA: addresses and rows aligned to 16 bytes."""

from __future__ import annotations

import torch

from ..common import pdl
from ..common.sizes import round_up
from . import packed_weight

_ALIGNMENT = 16  # bytes: of a tensor that TMA reads, and of its rows


def is_aligned(x: torch.Tensor) -> bool:
    """Return whether TMA can read a matrix as it lies: not if its rows overlap, either."""
    stride = x.stride(0)
    rows = x.size(0) == 1 or (stride * x.itemsize % _ALIGNMENT == 0 and stride >= x.size(1))
    return rows and x.data_ptr() % _ALIGNMENT == 0


def row_stride(x: torch.Tensor) -> int:
    """Return the stride of the rows of x, in elements.

    That of a single row says nothing, but TMA wants a good one all the same.
    """
    return x.stride(0) if x.size(0) > 1 else round_up(x.size(1), _ALIGNMENT)


def aligned_copy(x: torch.Tensor) -> torch.Tensor:
    """Return a copy of x that `is_aligned`."""
    data = x.view(torch.int8)
    rows, columns = data.shape
    width = round_up(columns, _ALIGNMENT)
    copy = torch.empty(rows, width, dtype=torch.int8, device=x.device)[:, :columns]
    return copy.copy_(data).view(x.dtype)


def as_read(
    x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, bool]:
    """Return x, w and bias as a kernel reads them, and whether it may read w and bias early.

    What TMA cannot read is copied or packed for the call, and a bias of another dtype converted;
    none of that is read early, while kernels before the product are still running.

    Args:
        x: [M, K].
        w: [N, K], or the data of a `PackedWeight`.
        bias: [N], or None.
        out_dtype: of the product, and so of the bias.
    """
    early = w.dim() == 4 and pdl.enabled()
    if bias is not None and bias.dtype is not out_dtype:
        bias, early = bias.to(out_dtype), False
    if w.dim() == 2 and not is_aligned(w):
        w = packed_weight.pack(w)
    if not is_aligned(x):
        x = aligned_copy(x)
    return x, w, bias, early
