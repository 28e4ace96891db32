"""Merging attention states on CUDA: from tensors to a launch of its kernel."""

from __future__ import annotations

import torch

from ...jit.loader import load
from ...jit.variants import MergeStates
from ..common import pdl
from ..common.device import (
    KERNEL_NAMES,
    current_stream,
    heads_of,
    on_device,
)


def merge_on_device(
    o_a: torch.Tensor,
    lse_a: torch.Tensor,
    o_b: torch.Tensor,
    lse_b: torch.Tensor,
    out: torch.Tensor,
    out_lse: torch.Tensor,
) -> None:
    """Launch the kernel on torch's current stream; the arguments are those of the op, checked.

    The kernel before it on the stream may still be writing any of these.
    """
    if o_a.size(0) == 0:
        return
    device = o_a.get_device()
    tokens, heads, dim = o_a.shape
    with on_device(device):
        stream = current_stream(device)
        variant = MergeStates(dtype=KERNEL_NAMES[o_a.dtype])
        load(variant, device=device, stream=stream).launch(
            o_a=heads_of(o_a),
            lse_a=heads_of(lse_a),
            o_b=heads_of(o_b),
            lse_b=heads_of(lse_b),
            out=heads_of(out),
            out_lse=heads_of(out_lse),
            tokens=tokens,
            heads=heads,
            dim=dim,
            stream=stream,
            pdl=pdl.enabled(),
        )
