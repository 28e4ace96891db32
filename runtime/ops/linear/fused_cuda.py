"""Linear layers that quantise x themselves on CUDA: from tensors to one launch."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import ClassVar

import torch

from ...jit.loader import load
from ...jit.registry import register_family
from ...jit.sources import CSRC
from ...jit.targets import HOPPER
from ...jit.variant import FLOAT_DTYPES, Variant, check
from ..common import pdl
from ..common.device import KERNEL_NAMES, address_of, current_stream, gpu, on_device
from . import tile_tuning
from .gemm_variants import GemmSmallM
from .quantize_cuda import FP32_WEIGHT, Quantize

_KINDS = ("per_token", "rms_norm")


@dataclass(frozen=True, kw_only=True)
class FusedLinear(Variant):
    """INT8 linear layer for one token that quantises its activations itself.

    Args:
        kind: per_token (x as it is) or rms_norm (with a residual added before, if given).
        in_dtype: of x and the residual: bf16 or fp16.
        out_dtype: of the output and the bias.
        max_k: the most input features, 4096 or 8192.
        weight_dtype: of the norm's weight: in_dtype, or fp32.
    """

    family: ClassVar[str] = "fused_linear"
    source: ClassVar[Path] = CSRC / "gemm_w8a8" / "fused" / "fused_linear_sm90.cu"
    needs: ClassVar[frozenset[str]] = frozenset({HOPPER})
    name_pattern: ClassVar[str] = (
        r"(?P<kind>\w+)-(?P<in_dtype>\w+)-int8-(?P<out_dtype>\w+)-k(?P<max_k>\d+)"
        r"(-(?P<weight_dtype>\w+)_weight)?"
    )
    dtype: ClassVar[str] = "int8"

    kind: str
    in_dtype: str
    out_dtype: str
    max_k: int
    weight_dtype: str = ""

    def __post_init__(self) -> None:
        check("kind", self.kind, _KINDS)
        check("in_dtype", self.in_dtype, ("bf16", "fp16"))
        check("out_dtype", self.out_dtype, FLOAT_DTYPES)
        check("max_k", self.max_k, (4096, 8192))
        if not self.weight_dtype:
            object.__setattr__(self, "weight_dtype", self.in_dtype)
        others = ("fp32",) if self.kind == "rms_norm" else ()
        check("weight_dtype", self.weight_dtype, (self.in_dtype, *others))

    @property
    def name(self) -> str:
        dtypes = f"{self.in_dtype}-{self.dtype}-{self.out_dtype}"
        weight = "" if self.weight_dtype == self.in_dtype else f"-{self.weight_dtype}_weight"
        return f"{self.family}-{self.kind}-{dtypes}-k{self.max_k}{weight}"

    def defines(self) -> dict[str, str]:
        product = GemmSmallM(out_dtype=self.out_dtype, max_m=8)
        rows = Quantize(
            kind=self.kind,
            in_dtype=self.in_dtype,
            out_dtype=self.dtype,
            weight_dtype=self.weight_dtype,
        )
        return {**product.defines(), **rows.defines(), "OSTINATO_MAX_K": str(self.max_k)}


# For one token of a 16-bit model, whose output projection may have fp32 results.
_LISTED = tuple(
    FusedLinear(kind=kind, in_dtype=in_dtype, out_dtype=out_dtype, max_k=max_k)
    for max_k, in_dtype in product((4096, 8192), ("bf16", "fp16"))
    for kind, out_dtype in (("rms_norm", in_dtype), ("rms_norm", "fp32"), ("per_token", in_dtype))
)
register_family(FusedLinear, _LISTED)

_MAX_K = (4096, 8192)
_VECTOR = 16  # bytes


def fused_kernel(
    kind: str, in_dtype: torch.dtype, k: int, dtype: torch.dtype, out_dtype: torch.dtype
) -> FusedLinear | None:
    """Return the kernel for one token of k elements of `in_dtype`; None if there is none.

    Args:
        kind: "per_token" or "rms_norm", which with `FP32_WEIGHT` at its end has a weight in fp32.
        in_dtype: of x.
        k: input features.
        dtype: of the weight; FP8 ones have none.
        out_dtype: of the output.
    """
    wide = kind.endswith(FP32_WEIGHT)
    kind = kind.removesuffix(FP32_WEIGHT)
    served = in_dtype.itemsize == 2 and dtype is torch.int8 and kind in _KINDS
    if not served or k % _VECTOR or k > _MAX_K[-1]:
        return None
    return FusedLinear(
        kind=kind,
        in_dtype=KERNEL_NAMES[in_dtype],
        out_dtype=KERNEL_NAMES[out_dtype],
        max_k=next(most for most in _MAX_K if k <= most),
        weight_dtype="fp32" if wide else "",
    )


def launch_fused(
    x: torch.Tensor,
    norm_weight: torch.Tensor | None,
    eps: float,
    residual: torch.Tensor | None,
    w: torch.Tensor,
    w_scale: torch.Tensor,
    bias: torch.Tensor | None,
    batch_invariant: bool,
    out: torch.Tensor,
    residual_out: torch.Tensor | None,
) -> bool:
    """Launch the layer on torch's current stream as one kernel, if there is one that serves it.

    It is for one token: every SM quantises all of x, which for two takes as long as a kernel of
    its own. The arguments are those of the ops of `fused.py`, checked; w is [n, k] or the
    data of a `PackedWeight`. The kernel reads x and `residual` only after those in front of it on
    the stream have ended, and all else before.
    """
    (m, n), k = out.shape, x.size(1)
    if m != 1 or n == 0 or w.dim() != 4:
        return False
    kind = "per_token"
    if norm_weight is not None:
        kind = "rms_norm" if norm_weight.dtype is x.dtype else f"rms_norm{FP32_WEIGHT}"
    kernel = fused_kernel(kind, x.dtype, k, w.dtype, out.dtype)
    rows = (x, norm_weight, residual, residual_out)
    if (
        kernel is None
        or not all(row is None or _is_aligned(row) for row in rows)
        or (bias is not None and bias.dtype is not out.dtype)
        or _overlap(x, out)  # a CTA would store into what another one has yet to read
    ):
        return False
    device = x.get_device()
    with on_device(device):
        name, sms = gpu(device)
        choice = tile_tuning.choose(
            name, sms, m, n, k, kernel.dtype, kernel.out_dtype, True, True, batch_invariant
        )
        if choice.variant != GemmSmallM(out_dtype=kernel.out_dtype, max_m=8):
            return False  # tuned: faster in two launches
        stream = current_stream(device)
        load(kernel, device=device, stream=stream).launch(
            x=x.data_ptr(),
            residual=address_of(residual),
            residual_out=address_of(residual_out),
            norm_weight=address_of(norm_weight),
            eps=eps,
            w=w.data_ptr(),
            w_scale=w_scale.data_ptr(),
            w_scale_stride=int(w_scale.numel() > 1),
            bias=address_of(bias),
            out=out.data_ptr(),
            n=n,
            k=k,
            pdl=pdl.enabled(),
            stream=stream,
        )
    return True


def _is_aligned(x: torch.Tensor) -> bool:
    """Return whether x [K] or [1, K] has an aligned address."""
    return x.data_ptr() % _VECTOR == 0


def _overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two dense tensors share memory."""
    return a.data_ptr() < b.data_ptr() + b.nbytes and b.data_ptr() < a.data_ptr() + a.nbytes
