"""16-bit products on CUDA: from tensors to a launch of the tiled GEMM kernel."""

from __future__ import annotations

import torch

from ...jit.loader import load
from ..common.device import KERNEL_NAMES, address_of, current_stream, gpu, on_device
from . import tile_tuning
from .gemm_operands import as_read, row_stride
from .tile_table import Choice
from .w8a8_gemm import ToSample


def dense_choice(
    device: int, m: int, n: int, k: int, dtype: torch.dtype, out_dtype: torch.dtype, packed: bool
) -> Choice:
    """Return the kernel that multiplies x [m, k] by w [n, k] of a 16-bit dtype, and its tiles.

    All that it may be add along K in one order.
    """
    names = (KERNEL_NAMES[dtype], KERNEL_NAMES[out_dtype])
    return tile_tuning.choose(*gpu(device), m, n, k, *names, packed, False, True)


def dense_gemm(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    n_active: torch.Tensor | None,
    out: torch.Tensor,
    to_sample: ToSample | None = None,
) -> None:
    """Launch the product on torch's current stream.

    The arguments are those of `ostinato.ops.linear`, checked, of 16 bits; w is [n, k] or the data
    of a `PackedWeight`.
    """
    (m, n), k = out.shape, x.size(1)
    if m == 0 or n == 0:
        return
    device = x.get_device()
    with on_device(device):
        x, w, bias, early = as_read(x, w, bias, out.dtype)
        packed = w.dim() == 4
        choice = dense_choice(device, m, n, k, x.dtype, out.dtype, packed)
        if to_sample is not None:
            to_sample.check(n, choice)
        stream = current_stream(device)
        load(choice.variant, device=device, stream=stream).launch(
            x=x.data_ptr(),
            x_stride=row_stride(x),
            w=w.data_ptr(),
            w_stride=0 if packed else row_stride(w),
            x_scale=0,
            x_scale_stride=0,
            w_scale=0,
            w_scale_stride=0,
            bias=address_of(bias),
            n_active=address_of(n_active),
            out=out.data_ptr(),
            out_stride=row_stride(out),
            m=m,
            n=n,
            k=k,
            pdl=early,
            stream=stream,
            **choice.cut,
            **({} if to_sample is None else to_sample.arguments()),
        )
