"""Norms, activations and quantisation on CUDA: from tensors to a launch of quantize.cu."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import chain, product
from pathlib import Path
from typing import Any, ClassVar

import torch

from ...jit.loader import load
from ...jit.registry import register_family
from ...jit.sources import CSRC
from ...jit.variant import FLOAT_DTYPES, OPERAND_DTYPES, Variant, check
from ..common import pdl
from ..common.device import KERNEL_NAMES, address_of, current_stream, on_device

NORMS = ("rms_norm", "layer_norm")
_FUNCTIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu2")
GATED = tuple(f"{function}_mul" for function in _FUNCTIONS)
ACTIVATIONS = (*_FUNCTIONS, *GATED)
QUANTIZE_KINDS = ("per_token", *NORMS, *ACTIVATIONS)
FP32_WEIGHT = "_fp32"
GROUP = 128  # elements of a row that share a scale, where a row has several


@dataclass(frozen=True, kw_only=True)
class Quantize(Variant):
    """Rows of 16/32-bit values to 8-bit rows and scales, after an optional norm or activation.

    A norm or activation may also be all there is: then rows keep their dtype.

    Args:
        kind: per_token (as they are), one of `NORMS` (with a residual added before, if given) or
            of `ACTIVATIONS`; those named _mul are of [gate | up].
        in_dtype: of x and the residual.
        out_dtype: int8 or e4m3, or in_dtype (not per_token).
        weight_dtype: of the norm's weight and bias: in_dtype, or fp32.
        group: 128: each 128 elements of a row have a scale of their own, e4m3 only; 0: rows have.
        asymmetric: each row has a scale and a zero point of its own, int8 only.
    """

    family: ClassVar[str] = "quantize"
    source: ClassVar[Path] = CSRC / "gemm_w8a8" / "quantize" / "quantize.cu"
    needs: ClassVar[frozenset[str]] = frozenset()
    name_pattern: ClassVar[str] = (
        r"(?P<kind>\w+)-(?P<in_dtype>\w+)-(?P<out_dtype>\w+)(-(?P<weight_dtype>\w+)_weight)?"
        r"(-group(?P<group>[1-9]\d*))?(?P<asymmetric>-asymmetric)?"
    )

    kind: str
    in_dtype: str
    out_dtype: str
    weight_dtype: str = ""
    group: int = 0
    asymmetric: bool = False

    def __post_init__(self) -> None:
        check("kind", self.kind, QUANTIZE_KINDS)
        check("in_dtype", self.in_dtype, FLOAT_DTYPES)
        results = OPERAND_DTYPES if self.kind == "per_token" else (*OPERAND_DTYPES, self.in_dtype)
        check("out_dtype", self.out_dtype, results)
        if not self.weight_dtype:
            object.__setattr__(self, "weight_dtype", self.in_dtype)
        others = ("fp32",) if self.kind in NORMS else ()
        check("weight_dtype", self.weight_dtype, (self.in_dtype, *others))
        check("group", self.group, (0, GROUP) if self.out_dtype == "e4m3" else (0,))
        known = (False, True) if self.out_dtype == "int8" else (False,)
        check("asymmetric", self.asymmetric, known)

    @property
    def name(self) -> str:
        weight = "" if self.weight_dtype == self.in_dtype else f"-{self.weight_dtype}_weight"
        group = f"-group{self.group}" if self.group else ""
        asymmetric = "-asymmetric" if self.asymmetric else ""
        dtypes = f"{self.in_dtype}-{self.out_dtype}"
        return f"{self.family}-{self.kind}-{dtypes}{weight}{group}{asymmetric}"

    @staticmethod
    def fields_of(groups: dict[str, Any]) -> dict[str, Any]:
        return {**groups, "asymmetric": "asymmetric" in groups}

    def defines(self) -> dict[str, str]:
        return {
            "OSTINATO_KIND": self.kind,
            "OSTINATO_IN_DTYPE": self.in_dtype,
            "OSTINATO_OUT_DTYPE": self.out_dtype,
            "OSTINATO_WEIGHT_DTYPE": self.weight_dtype,
            "OSTINATO_GROUP": str(self.group),
            "OSTINATO_ASYMMETRIC": str(int(self.asymmetric)),
        }


def _in_every_output(kind: str, in_dtype: str) -> Iterator[Quantize]:
    for out_dtype in (*OPERAND_DTYPES, *(() if kind == "per_token" else (in_dtype,))):
        yield Quantize(kind=kind, in_dtype=in_dtype, out_dtype=out_dtype)
    yield Quantize(kind=kind, in_dtype=in_dtype, out_dtype="e4m3", group=GROUP)
    yield Quantize(kind=kind, in_dtype=in_dtype, out_dtype="int8", asymmetric=True)


# Most models have these; of the others those that bf16 models of some families need.
_LISTED = (
    *product(("per_token", "rms_norm", "silu_mul"), FLOAT_DTYPES),
    *product(("layer_norm", "gelu_tanh_mul", "gelu_mul", "gelu_tanh", "gelu", "relu2"), ("bf16",)),
)
register_family(Quantize, chain.from_iterable(_in_every_output(*listed) for listed in _LISTED))


@cache
def quantize_kernel(
    kind: str,
    in_dtype: torch.dtype,
    out_dtype: torch.dtype,
    weight_dtype: torch.dtype | None = None,
    group: int = 0,
    *,
    asymmetric: bool = False,
) -> Quantize:
    """Return the kernel of `kind` (see `Quantize`) for these dtypes.

    Args:
        kind: one of `QUANTIZE_KINDS`.
        in_dtype: of x.
        out_dtype: of the rows that it writes.
        weight_dtype: of the norm's weight; by default that of x.
        group: elements that share a scale; 0: rows do.
        asymmetric: whether rows have zero points of their own.
    """
    return Quantize(
        kind=kind,
        in_dtype=KERNEL_NAMES[in_dtype],
        out_dtype=KERNEL_NAMES[out_dtype],
        weight_dtype=KERNEL_NAMES[weight_dtype or in_dtype],
        group=group,
        asymmetric=asymmetric,
    )


def input_kernel(
    kind: str,
    in_dtype: torch.dtype,
    out_dtype: torch.dtype,
    group: int = 0,
    *,
    asymmetric: bool = False,
) -> Quantize:
    """Return the kernel of what comes before a linear layer.

    Args:
        kind: as of `quantize_kernel`; with `FP32_WEIGHT` at its end, of a norm whose weight is
            fp32 whatever the dtype of x.
        in_dtype: likewise.
        out_dtype: likewise.
        group: likewise.
        asymmetric: likewise.
    """
    weight_dtype = torch.float32 if kind.endswith(FP32_WEIGHT) else None
    return quantize_kernel(
        *(kind.removesuffix(FP32_WEIGHT), in_dtype, out_dtype, weight_dtype, group),
        asymmetric=asymmetric,
    )


def quantize_rows(
    kind: str,
    x: torch.Tensor,
    scale: torch.Tensor | None,
    zero_point: torch.Tensor | None,
    out: torch.Tensor,
    scale_out: torch.Tensor | None,
    *,
    zero_point_out: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    residual_out: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    norm_bias: torch.Tensor | None = None,
    eps: float = 0.0,
    n_active: torch.Tensor | None = None,
    discard_x: bool = False,
    group: int = 0,
    power_of_two: bool = False,
) -> None:
    """Launch a kernel of `kind` (see `Quantize`) on torch's current stream.

    The arguments are those of the ops, checked; `out` of x's dtype takes no scales and no zero
    point. With a `group`, `scale_out` is [ceil(k / group), m]; with `zero_point_out` [m] rows have
    zero points of their own. For layer_norm x and `out` may be [tokens, heads, k], and norm_weight
    [heads, k]. Of these tensors the kernel reads only `n_active` and, where it quantises,
    `norm_weight` and `norm_bias` before those in front of it on the stream have ended.
    """
    m, k = out.size(0), out.size(-1)
    heads = out.size(1) if out.dim() == 3 else 1
    if m == 0:
        return
    device = x.get_device()
    with on_device(device):
        if scale_out is None and out.dtype is not x.dtype:
            scale_out = torch.empty(m, dtype=torch.float32, device=x.device)
        weight_dtype = None if norm_weight is None else norm_weight.dtype
        asymmetric = zero_point_out is not None
        dtypes = (x.dtype, out.dtype, weight_dtype)
        variant = quantize_kernel(kind, *dtypes, group, asymmetric=asymmetric)
        stream = current_stream(device)
        load(variant, device=device, stream=stream).launch(
            x=x.data_ptr(),
            x_stride=x.stride(0),
            out=out.data_ptr(),
            out_stride=out.stride(0),
            scale_out=address_of(scale_out),
            scale_stride=0 if scale_out is None or not group else scale_out.stride(0),
            power_of_two=power_of_two,
            static_scale=address_of(scale),
            zero_point=address_of(zero_point),
            zero_point_out=address_of(zero_point_out),
            residual=address_of(residual),
            residual_stride=0 if residual is None else residual.stride(0),
            residual_out=address_of(residual_out),
            residual_out_stride=0 if residual_out is None else residual_out.stride(0),
            norm_weight=address_of(norm_weight),
            eps=eps,
            m=m * heads,
            k=k,
            pdl=pdl.enabled(),
            n_active=address_of(n_active),
            discard_x=discard_x,
            heads=heads,
            norm_bias=address_of(norm_bias),
            stream=stream,
        )
