"""Norms, gates and quantisation on CUDA: from tensors to a launch of quantize.cu."""

from __future__ import annotations

from functools import cache

import torch

from ...jit.loader import load
from ...jit.variants import Quantize
from ..common import pdl
from ..common.device import (
    KERNEL_NAMES,
    address_of,
    current_stream,
    on_device,
)


@cache
def quantize_kernel(
    kind: str,
    in_dtype: torch.dtype,
    out_dtype: torch.dtype,
    weight_dtype: torch.dtype | None = None,
) -> Quantize:
    """Return the kernel of `kind` (see `Quantize`) for these dtypes.

    Args:
        kind: per_token, rms_norm or silu_mul.
        in_dtype: of x.
        out_dtype: of the rows that it writes.
        weight_dtype: of the norm's weight; by default that of x.
    """
    return Quantize(
        kind=kind,
        in_dtype=KERNEL_NAMES[in_dtype],
        out_dtype=KERNEL_NAMES[out_dtype],
        weight_dtype=KERNEL_NAMES[weight_dtype or in_dtype],
    )


def quantize_rows(
    kind: str,
    x: torch.Tensor,
    scale: torch.Tensor | None,
    zero_point: torch.Tensor | None,
    out: torch.Tensor,
    scale_out: torch.Tensor | None,
    *,
    residual: torch.Tensor | None = None,
    residual_out: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    n_active: torch.Tensor | None = None,
    discard_x: bool = False,
) -> None:
    """Launch a kernel of `kind` (see `Quantize`) on torch's current stream.

    The arguments are those of the ops, checked; `out` of x's dtype takes no scale and no zero
    point. Of these tensors the kernel reads only `n_active` and, where it quantises, `norm_weight`
    before those in front of it on the stream have ended.
    """
    m, k = out.shape
    if m == 0:
        return
    device = x.get_device()
    with on_device(device):
        if scale is None and scale_out is None and out.dtype is not x.dtype:
            scale_out = torch.empty(m, dtype=torch.float32, device=x.device)
        weight_dtype = None if norm_weight is None else norm_weight.dtype
        variant = quantize_kernel(kind, x.dtype, out.dtype, weight_dtype)
        stream = current_stream(device)
        load(variant, device=device, stream=stream).launch(
            x=x.data_ptr(),
            x_stride=x.stride(0),
            out=out.data_ptr(),
            out_stride=out.stride(0),
            scale_out=address_of(scale_out),
            static_scale=address_of(scale),
            zero_point=address_of(zero_point),
            residual=address_of(residual),
            residual_stride=0 if residual is None else residual.stride(0),
            residual_out=address_of(residual_out),
            residual_out_stride=0 if residual_out is None else residual_out.stride(0),
            norm_weight=address_of(norm_weight),
            eps=eps,
            m=m,
            k=k,
            pdl=pdl.enabled(),
            n_active=address_of(n_active),
            discard_x=discard_x,
            stream=stream,
        )
