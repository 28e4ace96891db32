"""W8A8 products by torch's operators, for GPUs that have no GEMM kernel of ours.

All of them can be captured, and a row has the same bits whatever other rows are in the call.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from ...jit.targets import FP8, Capability, target_of
from ..common.batch_invariant_rows import in_row_blocks
from ..common.sizes import round_up

# What torch asks of CUDA's operands.
_LEAST_INT8_ROWS = 32  # more than 16, and a tile of its kernels
_INT8_UNIT = 8
_FP8_UNIT = 16


def operator_of(dtype: torch.dtype, capability: Capability) -> str:
    """Return the name of what multiplies operands of a dtype on a GPU, as reports show it.

    Args:
        dtype: int8 or float8_e4m3fn.
        capability: of the GPU.
    """
    if dtype is torch.int8:
        return "torch (_int_mm)"
    if _multiplies_fp8(capability):
        return "torch (_scaled_mm)"
    return "torch (e4m3 dequantised to fp16)"


def int8_product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Return x·wᵀ [M, N] int32, exact, for x [M, K] and w [N, K] int8 on CUDA."""
    rows, columns = max(x.size(0), _LEAST_INT8_ROWS), round_up(w.size(0), _INT8_UNIT)
    depth = round_up(x.size(1), _INT8_UNIT)
    product = torch._int_mm(_padded(x, rows, depth), _padded(w, columns, depth).t())
    return product[: x.size(0), : w.size(0)]


def fp8_product(
    x: torch.Tensor, w: torch.Tensor, fast_accum: bool, capability: Capability
) -> torch.Tensor:
    """Return x·wᵀ [M, N] fp32 for x [M, K] and w [N, K] e4m3 on CUDA.

    Sums are in fp32, or with `fast_accum` as the tensor cores have them. Where a GPU multiplies no
    FP8, operands are dequantised to fp16 first, which holds each of their values.
    """
    out = torch.empty(x.size(0), w.size(0), dtype=torch.float32, device=x.device)
    if not _multiplies_fp8(capability):
        wide = w.to(torch.float16).t()
        in_row_blocks(
            lambda block: torch.mm(block, wide, out_dtype=torch.float32), x.to(torch.float16), out
        )
        return out
    columns, depth = round_up(w.size(0), _FP8_UNIT), round_up(x.size(1), _FP8_UNIT)
    # Bytes: torch does not pad FP8, and all bits zero is 0.0 in e4m3.
    operand = _padded(w.view(torch.int8), columns, depth).view(w.dtype).t()
    one = torch.ones((), dtype=torch.float32, device=x.device)

    def product(block: torch.Tensor) -> torch.Tensor:
        return torch._scaled_mm(
            block.view(x.dtype),
            operand,
            scale_a=one,
            scale_b=one,
            out_dtype=torch.float32,
            use_fast_accum=fast_accum,
        )[:, : w.size(0)]

    in_row_blocks(product, _padded(x.view(torch.int8), x.size(0), depth), out)
    return out


def _multiplies_fp8(capability: Capability) -> bool:
    target = target_of(capability)
    return target is not None and FP8 in target.features


def _padded(x: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Return x in dense rows, with rows and columns of zeros behind it."""
    padding = (0, columns - x.size(1), 0, rows - x.size(0))
    return functional.pad(x, padding) if any(padding) else x.contiguous()
