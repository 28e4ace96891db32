"""W8A8 products on CUDA: from tensors to a launch of one of the two GEMM kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...jit.loader import load
from ..common.device import KERNEL_NAMES, address_of, current_stream, gpu, on_device
from . import packed_weight, tile_tuning
from .block_scales import aligned_scales, scale_channels
from .gemm_operands import as_read, is_aligned, row_stride
from .gemm_variants import BLOCK_E4M3, GemmTiled, sharing
from .tile_table import Choice


def w8a8_gemm(
    x: torch.Tensor,
    w: torch.Tensor,
    x_scale: torch.Tensor,
    w_scale: torch.Tensor,
    bias: torch.Tensor | None,
    x_zero_point: torch.Tensor | None,
    w_sum: torch.Tensor | None,
    n_active: torch.Tensor | None,
    fast_accum: bool,
    batch_invariant: bool,
    out: torch.Tensor,
    to_sample: ToSample | None = None,
    *,
    block_scales: bool = False,
) -> None:
    """Launch the product on torch's current stream.

    The arguments are those of `ostinato.ops.w8a8_linear`, checked; w is [n, k] or the data of a
    `PackedWeight`. With `block_scales` the scales are those of `fp8_block_linear`.
    """
    (m, n), k = out.shape, x.size(1)
    if m == 0 or n == 0:
        return
    device = x.get_device()
    with on_device(device):
        x, w, bias, early = as_read(x, w, bias, out.dtype)
        if x_zero_point is not None and w_sum is None:
            w_sum, early = packed_weight.channel_sums(w, n), False
        packed = w.dim() == 4
        name, sms = gpu(device)
        dtype, out_dtype = KERNEL_NAMES[x.dtype], KERNEL_NAMES[out.dtype]
        scale_strides = (int(x_scale.numel() > 1), int(w_scale.numel() > 1))
        if block_scales:
            dtype, early = BLOCK_E4M3, early and is_aligned(w_scale)
            x_scale, w_scale = aligned_scales(x_scale), aligned_scales(w_scale)
            scale_strides = (row_stride(x_scale), row_stride(w_scale))
        choice = tile_tuning.choose(
            name, sms, m, n, k, dtype, out_dtype, packed, fast_accum, batch_invariant
        )
        if to_sample is not None:
            to_sample.check(n, choice)
        stream = current_stream(device)
        variant = choice.variant
        if block_scales:
            variant = sharing(variant, scale_channels(w_scale, n))
        load(variant, device=device, stream=stream).launch(
            x=x.data_ptr(),
            x_stride=row_stride(x),
            w=w.data_ptr(),
            w_stride=0 if packed else row_stride(w),
            x_scale=x_scale.data_ptr(),
            x_scale_stride=scale_strides[0],
            w_scale=w_scale.data_ptr(),
            w_scale_stride=scale_strides[1],
            bias=address_of(bias),
            x_zero_point=address_of(x_zero_point),
            x_zero_point_stride=int(x_zero_point is not None and x_zero_point.numel() > 1),
            w_sum=0 if w_sum is None or x_zero_point is None else w_sum.data_ptr(),
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


@dataclass(frozen=True)
class ToSample:
    """What a product whose rows are logits has to know of their sampling, and where their best go.

    `argmax` is [m, `argmax_parts`] int64, the others [m] fp32.
    """

    argmax: torch.Tensor
    temperature: torch.Tensor
    repetition_penalty: torch.Tensor | None

    def check(self, n: int, choice: Choice) -> None:
        """Check that the kernel that is launched writes as many parts as there is room for.

        A table of tiles may have come or gone since `argmax` was made.
        """
        got, expected = self.argmax.size(1), _parts_of(choice, n)
        if got != expected:
            raise RuntimeError(
                f"argmax: got {got} parts, expected {expected}, those of {choice.variant.name}: "
                "the table of tuned tiles changed during the call, or since it was traced"
            )

    def arguments(self) -> dict[str, int]:
        """Return them as arguments of a launch."""
        return {
            "best": self.argmax.data_ptr(),
            "best_stride": self.argmax.stride(0),
            "temperature": self.temperature.data_ptr(),
            "repetition_penalty": address_of(self.repetition_penalty),
        }


def argmax_parts(x: torch.Tensor, n: int, w: torch.Tensor, batch_invariant: bool) -> int:
    """Return in how many parts the best of a row of n logits come, for x [m, k] on a Hopper GPU.

    w is as of `w8a8_gemm` or `dense_gemm`, logits are fp32; 0 where the kernel that is chosen does
    not look for them. Products of 16 bits are batch invariant anyway. A function that torch.compile
    traces has 0, too: it would need the number for every m at once.
    """
    (m, k), device = x.shape, x.get_device()
    if torch.compiler.is_compiling() or m == 0 or n == 0:
        return 0
    # One that does not lie as it can be read is packed for the call.
    dtype, packed = KERNEL_NAMES[w.dtype], w.dim() == 4 or not is_aligned(w)
    how = (packed, True, batch_invariant or w.itemsize > 1)
    return _parts_of(tile_tuning.choose(*gpu(device), m, n, k, dtype, "fp32", *how), n)


def _parts_of(choice: Choice, n: int) -> int:
    variant = choice.variant
    if isinstance(variant, GemmTiled) and variant.finds_argmax:
        return variant.argmax_parts(n, choice.tile_channels)
    return 0
