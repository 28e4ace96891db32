"""The sum over a token's experts on CUDA: from tensors to a launch of csrc/moe_combine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch

from ...jit.loader import load
from ...jit.registry import register_family
from ...jit.sources import CSRC
from ...jit.variant import FLOAT_DTYPES, OneDtypeVariant
from ..common import pdl
from ..common.device import KERNEL_NAMES, address_of, current_stream, on_device


@dataclass(frozen=True, kw_only=True)
class MoeCombine(OneDtypeVariant):
    """The kernel; `dtype` is that of the rows."""

    family: ClassVar[str] = "moe_combine"
    source: ClassVar[Path] = CSRC / "moe_combine" / "moe_combine.cu"
    needs: ClassVar[frozenset[str]] = frozenset()


register_family(MoeCombine, [MoeCombine(dtype=dtype) for dtype in FLOAT_DTYPES])


def combine(
    y: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    shared: torch.Tensor | None,
    shared_gate: torch.Tensor | None,
    residual: torch.Tensor | None,
    total: torch.Tensor,
) -> None:
    """Launch the sum on torch's current stream; the arguments are those of the op, checked."""
    device = y.get_device()
    with on_device(device):
        stream = current_stream(device)
        kernel = MoeCombine(dtype=KERNEL_NAMES[y.dtype])
        load(kernel, device=device, stream=stream).launch(
            y=y.data_ptr(),
            y_token_stride=y.stride(0),
            y_slot_stride=y.stride(1),
            ids=ids.data_ptr(),
            weights=weights.data_ptr(),
            shared=address_of(shared),
            shared_stride=0 if shared is None else shared.stride(0),
            shared_gate=address_of(shared_gate),
            shared_gate_stride=0 if shared_gate is None else shared_gate.stride(0),
            shared_gate_fp32=shared_gate is not None and shared_gate.dtype is torch.float32,
            residual=address_of(residual),
            residual_stride=0 if residual is None else residual.stride(0),
            total=total.data_ptr(),
            total_stride=total.stride(0),
            tokens=y.size(0),
            top_k=y.size(1),
            dim=y.size(2),
            pdl=pdl.enabled(),
            stream=stream,
        )
