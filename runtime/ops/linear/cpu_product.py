"""Products x·Wᵀ on the CPU, in which a row has the same bits however many rows there are."""

from __future__ import annotations

import torch
from torch.nn import functional

from ..common.alike import ROWS, Alike, cancelling, pieces
from ..common.e4m3 import to_float32
from ..common.precision import full_precision
from ..common.sizes import ceil_div, round_up

_CACHE_LINE = 64  # bytes
_REFERENCES = (
    8,
    4,
    2,
    1,
)  # rows; few enough for a step of few requests, and of MKL's block kernels
_TRIED = 8192  # rows of a weight: more are no other case, and would take its memory once more
_COMPARED = 256  # results of a row at least, of which another order of summation changes many
_WIDENED = 1 << 19  # elements of a weight that are widened at once, so that they stay in the cache

_alike: dict[tuple[object, ...], Alike[int]] = {}


def float_product(
    x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
) -> None:
    """Write x·wᵀ + bias into `out` [M, N], rounded once to its dtype.

    Where oneDNN multiplies neither x's dtype nor into out's, both operands are widened to fp32.

    Args:
        x: [M, K] of any float dtype.
        w: [N, K] of x's dtype.
        bias: [N] of a float dtype, or None.
        out: written.
    """
    if x.dtype is torch.float32 or (x.dtype is out.dtype is torch.bfloat16 and _has_bf16_kernels()):
        _product(x, w, bias, out)
        return
    x = to_float32(x)
    step = round_up(max(1, _WIDENED // max(1, w.size(1))), 64)
    for start in range(0, w.size(0), step):
        part = slice(start, start + step)
        shift = None if bias is None else bias[part].float()
        _product(x, to_float32(w[part]), shift, out[:, part])


def int8_product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Return x·wᵀ [M, N] int32, exact, of x [M, K] and w [N, K] int8."""
    # torch (2.13) returns garbage for rows that share memory, and for one row of such a stride.
    x, w = (
        a.clone(memory_format=torch.contiguous_format) if a.stride(0) < a.size(1) else a
        for a in (x, w)
    )
    if x.size(1) == 1:
        # torch (2.13) returns garbage for matrices of depth 1.
        x, w = _padded(x, x.size(0), 2), _padded(w, w.size(0), 2)
    return torch._int_mm(x, w.t())


def _product(
    x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
) -> None:
    """Do `float_product` for operands that a library multiplies as they are."""
    if x.dtype is torch.float32:
        full_precision(x.device)
    if out.numel() == 0:
        return
    # MKL's order of summation depends on where in a cache line a row starts: all must start alike.
    depth = round_up(max(1, x.size(1)), _CACHE_LINE // x.itemsize)
    w = _padded(w, w.size(0), depth)
    alike = _alike_rows(w, bias)
    if x.size(1) == depth and _starts_a_line(x) and x.size(0) in ROWS and alike(x.size(0)):
        out.copy_(_multiplied(x, w, bias))
        return
    x = _padded(x, x.size(0), depth)
    if not _starts_a_line(x):
        x = x.clone()
    for start, stop, size in pieces(x.size(0), alike):
        rows = _padded(x[start:stop], size, depth)
        out[start:stop].copy_(_multiplied(rows, w, bias)[: stop - start])


def _starts_a_line(x: torch.Tensor) -> bool:
    return x.is_contiguous() and x.data_ptr() % _CACHE_LINE == 0


def _multiplied(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return x·wᵀ + bias of contiguous x and w with at least one element each."""
    if torch.backends.mkldnn.is_available():
        # Of torch's products this one is oneDNN's in fp32, too, whatever torch's switches are.
        multiply = torch.ops.mkldnn._linear_pointwise.default
        found: torch.Tensor = multiply(x, w, bias, "none", [], "")
        return found
    return functional.linear(x, w, bias)


def _alike_rows(w: torch.Tensor, bias: torch.Tensor | None) -> Alike[int]:
    """Return which numbers of rows of x are multiplied alike by w [N, K]."""
    (columns, depth), dtype = w.shape, w.dtype
    columns = min(columns, _TRIED + columns % _TRIED)
    key = (columns, depth, dtype, bias is None, torch.get_num_threads())
    if key not in _alike:

        def results(rows: int, seed: int) -> torch.Tensor:
            x, weight = cancelling(depth, columns, dtype, seed)
            shift = None if bias is None else torch.zeros(columns, dtype=dtype, device="cpu")
            return _multiplied(x.expand(rows, -1).contiguous(), weight, shift)

        def trial(rows: int) -> torch.Tensor:
            seeds = range(ceil_div(_COMPARED, columns))
            return torch.cat([results(rows, seed) for seed in seeds], dim=1)

        _alike[key] = Alike(trial, _REFERENCES)
    return _alike[key]


def _has_bf16_kernels() -> bool:
    # A torch without oneDNN lacks the op that asks for them, too.
    available = torch.backends.mkldnn.is_available()
    return available and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _padded(x: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Return x with zeros to its right and below, contiguous; x itself if that is what it is."""
    if x.shape == (rows, columns):
        return x.contiguous()
    return functional.pad(x, (0, columns - x.size(1), 0, rows - x.size(0))).contiguous()
