"""The embedding on CUDA: from tensors that are known to fit to a launch of csrc/embed/embed.cu."""

from __future__ import annotations

import torch

from ..jit.loader import load
from ..jit.variants import Embed
from .common import pdl
from .common.device import (
    KERNEL_NAMES,
    address_of,
    current_stream,
    on_device,
)


def embed_kernel(dtype: torch.dtype) -> Embed:
    """Return the kernel for a table of this dtype."""
    return Embed(dtype=KERNEL_NAMES[dtype])


def embed_rows(
    tokens: torch.Tensor,
    table: torch.Tensor,
    seen: torch.Tensor | None,
    seen_rows: torch.Tensor | None,
    n_active: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """Launch the kernel on torch's current stream.

    The arguments are those of the op, checked, for at least one token. The kernel reads and writes
    none of these tensors before the kernels in front of it on the stream have ended, nor does it
    let the kernel behind it start before.
    """
    device = table.get_device()
    with on_device(device):
        stream = current_stream(device)
        load(embed_kernel(table.dtype), device=device, stream=stream).launch(
            tokens=tokens.data_ptr(),
            table=table.data_ptr(),
            table_stride=table.stride(0),
            out=out.data_ptr(),
            out_stride=out.stride(0),
            rows=tokens.size(0),
            vocabulary=table.size(0),
            dim=table.size(1),
            stream=stream,
            seen=address_of(seen),
            seen_stride=0 if seen is None else seen.stride(0),
            seen_size=0 if seen is None else seen.size(0),
            seen_rows=address_of(seen_rows),
            n_active=address_of(n_active),
            pdl=pdl.enabled(),
        )
