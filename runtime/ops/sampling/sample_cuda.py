"""Sampling on CUDA: from tensors that are known to fit to the launch."""

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
from ..common.device import KERNEL_NAMES, address_of, current_stream, has_kernel, on_device

# csrc/sampling/sample_row.cuh: sums of so many probabilities fit in 64 bits.
_MAX_VOCABULARY = 1 << 19


@dataclass(frozen=True, kw_only=True)
class Sample(OneDtypeVariant):
    """Tokens from logits: greedy, or drawn after temperature, top-k, top-p and min-p.

    Args:
        dtype: of the logits.
    """

    family: ClassVar[str] = "sample"
    source: ClassVar[Path] = CSRC / "sampling" / "sample.cu"
    needs: ClassVar[frozenset[str]] = frozenset()


register_family(Sample, [Sample(dtype=dtype) for dtype in FLOAT_DTYPES])


def sample_kernel(dtype: torch.dtype) -> Sample:
    """Return the kernel for logits of this dtype."""
    return Sample(dtype=KERNEL_NAMES[dtype])


def serves(logits: torch.Tensor) -> bool:
    """Return whether the kernel takes these logits [B, V]."""
    return logits.size(1) <= _MAX_VOCABULARY and has_kernel(Sample, logits)


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    counters: torch.Tensor,
    repetition_penalty: torch.Tensor | None,
    seen: torch.Tensor | None,
    seen_rows: torch.Tensor | None,
    argmax: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """Launch the kernel on the current stream; arguments as `ostinato.ops.sample` has them."""
    device = logits.get_device()
    with on_device(device):
        stream = current_stream(device)
        load(sample_kernel(logits.dtype), device=device, stream=stream).launch(
            logits=logits.data_ptr(),
            logits_stride=logits.stride(0),
            temperature=temperature.data_ptr(),
            top_k=top_k.data_ptr(),
            top_k_is_int64=top_k.dtype == torch.int64,
            top_p=top_p.data_ptr(),
            min_p=min_p.data_ptr(),
            seeds=seeds.data_ptr(),
            counters=counters.data_ptr(),
            repetition_penalty=address_of(repetition_penalty),
            seen=address_of(seen),
            seen_stride=0 if seen is None else seen.stride(0),
            seen_rows=address_of(seen_rows),
            best=address_of(argmax),
            best_stride=0 if argmax is None else argmax.stride(0),
            parts=0 if argmax is None else argmax.size(1),
            out=out.data_ptr(),
            rows=logits.size(0),
            vocabulary=logits.size(1),
            pdl=pdl.enabled(),
            stream=stream,
        )
