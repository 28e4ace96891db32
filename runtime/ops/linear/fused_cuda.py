"""Linear layers that quantise x themselves on CUDA: from tensors to one launch."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import ClassVar, NamedTuple

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
from .packed_weight import TILE_CHANNELS
from .quantize_cuda import FP32_WEIGHT, GATED, Quantize

_KINDS = ("per_token", "rms_norm")
_GATE = "_mul"


@dataclass(frozen=True, kw_only=True)
class FusedLinear(Variant):
    """INT8 linear layer for one token that quantises its activations itself.

    Args:
        kind: per_token (x as it is) or rms_norm (with a residual added before, if given).
        in_dtype: of x and the residual: bf16 or fp16.
        out_dtype: of the output and the bias.
        max_k: the most input features, 4096 or 8192.
        weight_dtype: of the norm's weight: in_dtype, or fp32.
        activation: one of `GATED`, of the gates and ups that the layer has for results, which it
            leaves to `ActivatedLinear`; "": it stores its results.
    """

    family: ClassVar[str] = "fused_linear"
    source: ClassVar[Path] = CSRC / "gemm_w8a8" / "fused" / "fused_linear_sm90.cu"
    needs: ClassVar[frozenset[str]] = frozenset({HOPPER})
    name_pattern: ClassVar[str] = (
        r"(?P<kind>\w+)-(?P<in_dtype>\w+)-int8-(?P<out_dtype>\w+)-k(?P<max_k>\d+)"
        r"(-(?P<weight_dtype>\w+)_weight)?(-then_(?P<activation>\w+))?"
    )
    dtype: ClassVar[str] = "int8"

    kind: str
    in_dtype: str
    out_dtype: str
    max_k: int
    weight_dtype: str = ""
    activation: str = ""

    def __post_init__(self) -> None:
        check("kind", self.kind, _KINDS)
        check("in_dtype", self.in_dtype, ("bf16", "fp16"))
        check("out_dtype", self.out_dtype, FLOAT_DTYPES)
        check("max_k", self.max_k, (4096, 8192))
        if not self.weight_dtype:
            object.__setattr__(self, "weight_dtype", self.in_dtype)
        others = ("fp32",) if self.kind == "rms_norm" else ()
        check("weight_dtype", self.weight_dtype, (self.in_dtype, *others))
        gated = GATED if self.out_dtype == self.in_dtype else ()
        check("activation", self.activation, ("", *gated))

    @property
    def name(self) -> str:
        dtypes = f"{self.in_dtype}-{self.dtype}-{self.out_dtype}"
        weight = "" if self.weight_dtype == self.in_dtype else f"-{self.weight_dtype}_weight"
        then = f"-then_{self.activation}" if self.activation else ""
        return f"{self.family}-{self.kind}-{dtypes}-k{self.max_k}{weight}{then}"

    @property
    def x_slots(self) -> int:
        """Chunks of x that a warp holds in registers (csrc: kXSlots).

        Codes lie in shared memory, from which the next ones soon come, so one is enough, and a
        launch has a quarter less code to fetch. With 8192 features and norm weights in fp32 a
        quantiser holds 32 of these in each thread, and one slot has not paid: Gemma 3 27B's step
        took .5% more (docs/notebooks/decode_step.md).
        """
        return 4 if self.weight_dtype == "fp32" and self.max_k == _MAX_K[-1] else 1

    def defines(self) -> dict[str, str]:
        product = GemmSmallM(out_dtype=self.out_dtype, max_m=8, x_slots=self.x_slots)
        rows = Quantize(
            kind=self.kind,
            in_dtype=self.in_dtype,
            out_dtype=self.dtype,
            weight_dtype=self.weight_dtype,
        )
        return {
            **product.defines(),
            **rows.defines(),
            "OSTINATO_MAX_K": str(self.max_k),
            "OSTINATO_ACTIVATION": self.activation.removesuffix(_GATE) or "none",
            "OSTINATO_PAIRED_TILES": str(int(bool(self.activation))),
        }


@dataclass(frozen=True, kw_only=True)
class ActivatedLinear(Variant):
    """INT8 linear layer for one token, of what `FusedLinear` with an activation has left.

    Args:
        out_dtype: of the output and the bias.
    """

    family: ClassVar[str] = "activated_linear"
    source: ClassVar[Path] = CSRC / "gemm_w8a8" / "fused" / "activated_linear_sm90.cu"
    needs: ClassVar[frozenset[str]] = frozenset({HOPPER})
    name_pattern: ClassVar[str] = r"int8-(?P<out_dtype>\w+)"
    dtype: ClassVar[str] = "int8"

    out_dtype: str

    def __post_init__(self) -> None:
        check("out_dtype", self.out_dtype, FLOAT_DTYPES)

    @property
    def name(self) -> str:
        return f"{self.family}-{self.dtype}-{self.out_dtype}"

    def defines(self) -> dict[str, str]:
        # With eight a step takes .6 to 1.4% more (docs/notebooks/decode_step.md).
        return GemmSmallM(out_dtype=self.out_dtype, max_m=8, x_slots=4).defines()


# For one token of a 16-bit model, whose output projection may have fp32 results.
_LISTED = tuple(
    FusedLinear(kind=kind, in_dtype=in_dtype, out_dtype=out_dtype, max_k=max_k, activation=then)
    for max_k, in_dtype in product((4096, 8192), ("bf16", "fp16"))
    for kind, out_dtype, then in (
        *(("rms_norm", in_dtype, ""), ("rms_norm", "fp32", ""), ("per_token", in_dtype, "")),
        ("rms_norm", in_dtype, "silu_mul"),
    )
)
register_family(FusedLinear, _LISTED)
register_family(ActivatedLinear, [ActivatedLinear(out_dtype=dtype) for dtype in ("bf16", "fp16")])

_MAX_K = (4096, 8192)
_VECTOR = 16  # bytes


def fused_kernel(
    kind: str,
    in_dtype: torch.dtype,
    k: int,
    dtype: torch.dtype,
    out_dtype: torch.dtype,
    activation: str = "",
) -> FusedLinear | None:
    """Return the kernel for one token of k elements of `in_dtype`; None if there is none.

    Args:
        kind: "per_token" or "rms_norm", which with `FP32_WEIGHT` at its end has a weight in fp32.
        in_dtype: of x.
        k: input features.
        dtype: of the weight; FP8 ones have none.
        out_dtype: of the output.
        activation: of the gates and ups that the output holds; "" if it is stored.
    """
    wide = kind.endswith(FP32_WEIGHT)
    kind = kind.removesuffix(FP32_WEIGHT)
    served = in_dtype.itemsize == 2 and dtype is torch.int8 and kind in _KINDS
    served = served and (not activation or (activation in GATED and out_dtype is in_dtype))
    if not served or k % _VECTOR or k > _MAX_K[-1]:
        return None
    return FusedLinear(
        kind=kind,
        in_dtype=KERNEL_NAMES[in_dtype],
        out_dtype=KERNEL_NAMES[out_dtype],
        max_k=next(most for most in _MAX_K if k <= most),
        weight_dtype="fp32" if wide else "",
        activation=activation,
    )


def activated_kernel(k: int, dtype: torch.dtype, out_dtype: torch.dtype) -> ActivatedLinear | None:
    """Return the kernel for one token of k elements of an activation; None if there is none.

    `dtype` is that of the weight.
    """
    if dtype is not torch.int8 or k % TILE_CHANNELS:
        return None
    return ActivatedLinear(out_dtype=KERNEL_NAMES[out_dtype])


class Weights(NamedTuple):
    """What belongs to the weight of a layer: w [n, k] or the data of a `PackedWeight`."""

    w: torch.Tensor
    scale: torch.Tensor
    bias: torch.Tensor | None

    @property
    def arguments(self) -> dict[str, int]:
        """Of a launch."""
        return {
            "w": self.w.data_ptr(),
            "w_scale": self.scale.data_ptr(),
            "w_scale_stride": int(self.scale.numel() > 1),
            "bias": address_of(self.bias),
        }


def launch_fused(
    x: torch.Tensor,
    norm_weight: torch.Tensor | None,
    eps: float,
    residual: torch.Tensor | None,
    weights: Weights,
    batch_invariant: bool,
    out: torch.Tensor,
    residual_out: torch.Tensor | None,
) -> bool:
    """Launch the layer on torch's current stream as one kernel, if there is one that serves it.

    It is for one token: every SM quantises all of x, which for two takes as long as a kernel of
    its own. The arguments are those of the ops of `fused.py`, checked. The kernel reads x and
    `residual` only after those in front of it on the stream have ended, and all else before.
    """
    (m, n), k = out.shape, x.size(1)
    if m != 1 or n == 0 or weights.w.dim() != 4:
        return False
    kernel = fused_kernel(_kind_of(x, norm_weight), x.dtype, k, weights.w.dtype, out.dtype)
    rows = (x, norm_weight, residual, residual_out)
    if (
        kernel is None
        or not all(row is None or _is_aligned(row) for row in rows)
        or (weights.bias is not None and weights.bias.dtype is not out.dtype)
        or _overlap(x, out)  # a CTA would store into what another one has yet to read
    ):
        return False
    device = x.get_device()
    with on_device(device):
        if not _streams(device, n, k, kernel.out_dtype, batch_invariant):
            return False  # tuned: faster in two launches
        stream = current_stream(device)
        load(kernel, device=device, stream=stream).launch(
            x=x.data_ptr(),
            residual=address_of(residual),
            residual_out=address_of(residual_out),
            norm_weight=address_of(norm_weight),
            eps=eps,
            out=out.data_ptr(),
            n=n,
            k=k,
            pdl=pdl.enabled(),
            stream=stream,
            **weights.arguments,
        )
    return True


def launch_gated(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None,
    gate_up: Weights,
    down: Weights,
    width: int,
    kind: str,
    batch_invariant: bool,
    out: torch.Tensor,
    residual_out: torch.Tensor | None,
) -> bool:
    """Launch an MLP on torch's current stream as two kernels, if there are some that serve it.

    It is for one token, as `launch_fused`. The arguments are those of the op of `fused.py`,
    checked; `width` is how many features `down` has for inputs.
    """
    (m, n), hidden = out.shape, x.size(1)
    if m != 1 or n == 0 or gate_up.w.dim() != 4 or down.w.dim() != 4:
        return False
    norm_kind = _kind_of(x, norm_weight)
    first = fused_kernel(norm_kind, x.dtype, hidden, gate_up.w.dtype, out.dtype, kind)
    second = activated_kernel(width, down.w.dtype, out.dtype)
    rows = (x, norm_weight, residual, residual_out)
    biases = (gate_up.bias, down.bias)
    if (
        first is None
        or second is None
        or not all(row is None or _is_aligned(row) for row in rows)
        or any(bias is not None and bias.dtype is not out.dtype for bias in biases)
    ):
        return False
    device = x.get_device()
    with on_device(device):
        how = (first.out_dtype, batch_invariant)
        if not (_streams(device, 2 * width, hidden, *how) and _streams(device, n, width, *how)):
            return False
        ctas = min(width // TILE_CHANNELS, gpu(device)[1])
        activated = torch.empty(width + ctas, dtype=torch.float32, device=x.device)
        maxima = activated[width:].data_ptr()
        stream = current_stream(device)
        load(first, device=device, stream=stream).launch(
            x=x.data_ptr(),
            residual=address_of(residual),
            residual_out=address_of(residual_out),
            norm_weight=norm_weight.data_ptr(),
            eps=eps,
            **gate_up.arguments,
            out=activated.data_ptr(),
            maxima=maxima,
            n_maxima=ctas,
            n=2 * width,
            k=hidden,
            pdl=pdl.enabled(),
            stream=stream,
        )
        load(second, device=device, stream=stream).launch(
            x=activated.data_ptr(),
            maxima=maxima,
            n_maxima=ctas,
            **down.arguments,
            out=out.data_ptr(),
            n=n,
            k=width,
            pdl=pdl.enabled(),
            stream=stream,
        )
    return True


def _kind_of(x: torch.Tensor, norm_weight: torch.Tensor | None) -> str:
    if norm_weight is None:
        return "per_token"
    return "rms_norm" if norm_weight.dtype is x.dtype else f"rms_norm{FP32_WEIGHT}"


def _streams(device: int, n: int, k: int, out_dtype: str, batch_invariant: bool) -> bool:
    """Return whether the weights of an INT8 product of one token are streamed."""
    name, sms = gpu(device)
    choice = tile_tuning.choose(
        name, sms, 1, n, k, FusedLinear.dtype, out_dtype, True, True, batch_invariant
    )
    return choice.variant == GemmSmallM(out_dtype=out_dtype, max_m=8)


def _is_aligned(x: torch.Tensor) -> bool:
    """Return whether x [K] or [1, K] has an aligned address."""
    return x.data_ptr() % _VECTOR == 0


def _overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two dense tensors share memory."""
    return a.data_ptr() < b.data_ptr() + b.nbytes and b.data_ptr() < a.data_ptr() + a.nbytes
