"""Implementations of W8A8 and bf16 products: our ops, and torch's operators."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache

import torch

from ... import ops
from ...jit.variant import Variant
from ...ops.common.device import device_index, gpu
from ...ops.common.pdl import pdl
from ...ops.linear import tile_tuning
from ...ops.linear.block_scales import aligned_scales
from ...ops.linear.gemm_variants import BLOCK_E4M3, DTYPES_16_BIT
from ..harness.benchmark import Implementation, each
from ..harness.summary import OURS
from .cases import Case
from .inputs import OUT_DTYPE, Inputs, Layout

# As the command line, and the rows with underscores, call operands.
DTYPES = {"int8": "int8", "fp8": "e4m3", "fp8-block": BLOCK_E4M3, "bf16": "bf16"}
OURS_BF16 = f"{OURS}bf16"


def ours(dtype: str, *, with_pdl: bool) -> Implementation[Case, Inputs]:
    """Return our op for a dtype in `DTYPES`, launched with or without PDL."""
    spelt = dtype.replace("-", "_")
    name = f"{OURS}{spelt}" if with_pdl else f"{OURS}{spelt}_nopdl"
    call = _with_pdl if with_pdl else _without_pdl
    return Implementation(name, Layout(DTYPES[dtype], scaled=dtype != "bf16"), each(call))


def kernel(case: Case, operand: str, device: torch.device) -> Variant:
    """Return the kernel that our op takes for a case with these operands."""
    name, sms = gpu(device_index(device))
    n, k = case.shape.n, case.shape.k
    in_order = operand in DTYPES_16_BIT
    choice = tile_tuning.choose(
        name, sms, case.m, n, k, operand, "bf16", True, not in_order, in_order
    )
    return choice.variant


def _with_pdl(s: Inputs) -> torch.Tensor:
    if s.x.dtype is torch.bfloat16:
        return ops.linear(s.x, s.weight.packed, out=s.out)
    scales = (s.x_scale, s.weight.scale)
    if s.weight.blocks is not None:
        return ops.fp8_block_linear(s.x, s.weight.packed, *scales, out=s.out)
    return ops.w8a8_linear(s.x, s.weight.packed, *scales, out=s.out, fast_accum=True)


def _without_pdl(s: Inputs) -> torch.Tensor:
    with pdl(False):
        return _with_pdl(s)


def _scaled_mm_rowwise(s: Inputs) -> torch.Tensor:
    return torch._scaled_mm(
        s.x,
        s.weight.plain.t(),
        s.x_scale.unsqueeze(1),
        s.weight.scale.unsqueeze(0),
        out_dtype=OUT_DTYPE,
        use_fast_accum=True,
    )


def _scaled_mm_tensorwise(s: Inputs) -> torch.Tensor:
    one = _one(s.x.device)
    return torch._scaled_mm(
        s.x, s.weight.plain.t(), one, one, out_dtype=OUT_DTYPE, use_fast_accum=True
    )


def _int_mm(s: Inputs) -> torch.Tensor:
    return torch._int_mm(s.x, s.weight.plain.t())


def _bf16(s: Inputs) -> torch.Tensor:
    return torch.mm(s.x, s.weight.plain.t())


@cache
def _one(device: torch.device) -> torch.Tensor:
    return torch.ones((), device=device)


def _few_tokens(case: Case) -> str | None:
    return None if case.m > 16 else f"got {case.m} tokens, expected more than 16"


def _scaled_mm_blockwise(
    case: Case, sets: Sequence[Inputs]
) -> Sequence[Callable[[], torch.Tensor]]:
    """Bind cuBLASLt's product with blocks, whose scales are laid out as it wants them."""

    def bound(s: Inputs, blocks: torch.Tensor) -> Callable[[], torch.Tensor]:
        x_scale, w = s.x_scale.contiguous().t(), s.weight.plain.t()
        return lambda: torch._scaled_mm(s.x, w, x_scale, blocks.t(), out_dtype=OUT_DTYPE)

    # Versions of torch differ in whether rows of blocks begin at multiples of 16 bytes.
    layouts: list[Callable[[torch.Tensor], torch.Tensor]] = [torch.clone, aligned_scales]
    for layout in layouts:
        calls = [bound(s, layout(s.weight.blocks)) for s in sets if s.weight.blocks is not None]
        try:
            calls[0]()
        except RuntimeError:
            if layout is layouts[-1]:
                raise
        else:
            break
    return calls


# Shown beside the others: they do not do what ours does.
NOT_W8A8 = ("int_mm", "bf16")
# Compared with our products with block scales, and with no others.
BLOCK_PEERS = ("dg_blk", "tri_blk", "smm_blk")
BF16_PEERS = ("bf16",)  # cuBLAS
# In the order in which they are timed: torch's operators, and the adapters of others.
PEERS: Mapping[str, Implementation[Case, Inputs] | str] = {
    "sgl_i8": "sgl_kernel.py",
    "sgl_f8": "sgl_kernel.py",
    "dg_blk": "deep_gemm.py",
    "tri_blk": "triton_block.py",
    "smm_blk": Implementation("smm_blk", Layout(BLOCK_E4M3), _scaled_mm_blockwise),
    "smm_row": Implementation("smm_row", Layout("e4m3"), each(_scaled_mm_rowwise)),
    "smm_ten": Implementation("smm_ten", Layout("e4m3", scaled=False), each(_scaled_mm_tensorwise)),
    "int_mm": Implementation(
        "int_mm", Layout("int8", scaled=False, out_bytes=4), each(_int_mm), refuses=_few_tokens
    ),
    "bf16": Implementation("bf16", Layout("bf16", scaled=False), each(_bf16)),
}
