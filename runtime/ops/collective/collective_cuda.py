"""Collectives over peer memory on CUDA: from tensors to launches of csrc/collective."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, ClassVar

import torch

from ...jit.registry import register_family
from ...jit.sources import CSRC
from ...jit.variant import FLOAT_DTYPES, OPERAND_DTYPES, Variant, check
from ..common.device import KERNEL_NAMES
from ..common.sizes import ceil_div
from ..linear.quantize_cuda import GROUP

MOST_RANKS = 8
VECTOR = 16  # bytes that a thread sends at once
ROW_VECTORS = 2048  # of the longest row
_RANKS = (2, 4, MOST_RANKS)
_KINDS = ("sum", "rms_norm", "gather")

# Up to so many bytes of a rank's rows, every rank sends them to all others and adds up by itself;
# of more, each row goes to one rank, and its sum to all. The second takes another trip, of about
# 2.5 µs, and size - 1 times 1 - 2 / size of the first one's bytes less, at 400 GB/s: so it pays
# from 670 KB and 190 KB on. Between two ranks it sends as many bytes, and never does.
_ONE_SHOT_BYTES = {2: 1 << 62, 4: 640 << 10, 8: 192 << 10}


@dataclass(frozen=True, kw_only=True)
class Collective(Variant):
    """Rows of all ranks, or their sum, alone or with residual, norm and quantisation.

    Args:
        kind: sum, rms_norm (of the sum, with a residual added before if given) or gather.
        ranks: how many there may be: 2, 4 or 8.
        in_dtype: of x, the residual and the sum.
        out_dtype: int8 or e4m3 (rms_norm only), or in_dtype.
        weight_dtype: of the norm's weight: in_dtype, or fp32.
        group: 128: each 128 elements of a row have a scale of their own, e4m3 only; 0: rows have.
    """

    family: ClassVar[str] = "collective"
    source: ClassVar[Path] = CSRC / "collective" / "collective.cu"
    needs: ClassVar[frozenset[str]] = frozenset()
    name_pattern: ClassVar[str] = (
        r"(?P<kind>\w+)-ranks(?P<ranks>[1-9]\d*)-(?P<in_dtype>\w+)-(?P<out_dtype>\w+)"
        r"(-(?P<weight_dtype>\w+)_weight)?(-group(?P<group>[1-9]\d*))?"
    )

    kind: str
    ranks: int
    in_dtype: str
    out_dtype: str
    weight_dtype: str = ""
    group: int = 0

    def __post_init__(self) -> None:
        check("kind", self.kind, _KINDS)
        check("ranks", self.ranks, _RANKS)
        check("in_dtype", self.in_dtype, FLOAT_DTYPES)
        normalizes = self.kind == "rms_norm"
        codes = OPERAND_DTYPES if normalizes else ()
        check("out_dtype", self.out_dtype, (*codes, self.in_dtype))
        if not self.weight_dtype:
            object.__setattr__(self, "weight_dtype", self.in_dtype)
        others = ("fp32",) if normalizes else ()
        check("weight_dtype", self.weight_dtype, (self.in_dtype, *others))
        check("group", self.group, (0, GROUP) if self.out_dtype == "e4m3" else (0,))

    @property
    def name(self) -> str:
        weight = "" if self.weight_dtype == self.in_dtype else f"-{self.weight_dtype}_weight"
        group = f"-group{self.group}" if self.group else ""
        dtypes = f"{self.in_dtype}-{self.out_dtype}"
        return f"{self.family}-{self.kind}-ranks{self.ranks}-{dtypes}{weight}{group}"

    def defines(self) -> dict[str, str]:
        return {
            "OSTINATO_COLLECTIVE": self.kind,
            "OSTINATO_RANKS": str(self.ranks),
            "OSTINATO_KIND": "rms_norm",
            "OSTINATO_IN_DTYPE": self.in_dtype,
            "OSTINATO_OUT_DTYPE": self.out_dtype,
            "OSTINATO_WEIGHT_DTYPE": self.weight_dtype,
            "OSTINATO_GROUP": str(self.group),
            "OSTINATO_ASYMMETRIC": "0",
        }


# Of models in bf16, whose logits are fp32; others are compiled when they are asked for.
register_family(
    Collective,
    [
        Collective(kind=kind, ranks=ranks, in_dtype=in_dtype, out_dtype=out_dtype, group=group)
        for ranks, (kind, in_dtype, out_dtype, group) in product(
            _RANKS,
            (
                ("sum", "bf16", "bf16", 0),
                ("rms_norm", "bf16", "bf16", 0),
                ("rms_norm", "bf16", "int8", 0),
                ("rms_norm", "bf16", "e4m3", 0),
                ("rms_norm", "bf16", "e4m3", GROUP),
                ("gather", "bf16", "bf16", 0),
                ("gather", "fp32", "fp32", 0),
            ),
        )
    ],
)


@cache
def collective_kernel(
    kind: str,
    size: int,
    in_dtype: torch.dtype,
    out_dtype: torch.dtype,
    weight_dtype: torch.dtype | None = None,
    group: int = 0,
) -> Collective:
    """Return the kernel for `size` ranks (see `Collective`)."""
    return Collective(
        kind=kind,
        ranks=next(ranks for ranks in _RANKS if size <= ranks),
        in_dtype=KERNEL_NAMES[in_dtype],
        out_dtype=KERNEL_NAMES[out_dtype],
        weight_dtype=KERNEL_NAMES[weight_dtype or in_dtype],
        group=group,
    )


@dataclass(frozen=True)
class Rows:
    """Rows that one launch takes: from `first` on, so many, in one shot or in two."""

    first: int
    count: int
    two_shot: bool


def launches_of(
    rows: int, row_vectors: int, size: int, region_vectors: int, *, gathers: bool = False
) -> Iterator[Rows]:
    """Yield the launches of a collective; they follow from shapes alone, which graphs freeze.

    Args:
        rows: [T] of each rank.
        row_vectors: of 16 bytes, of a row.
        size: how many ranks.
        region_vectors: of one of the three regions of a rank's buffer, which hold a launch.
        gathers: whether all rows of all ranks are wanted, which takes one shot always.
    """
    ranks = next(ranks for ranks in _RANKS if size <= ranks)
    two_shot = not gathers and rows * row_vectors * VECTOR > _ONE_SHOT_BYTES[ranks]
    held = region_vectors // row_vectors
    # The others' rows; of two shots a size-th of them, which this rank adds up, and all sums.
    most = (held - size) // 2 if two_shot else held // max(1, size - 1)
    each = ceil_div(rows, max(1, ceil_div(rows, most)))  # a short last one would take a trip, too
    for first in range(0, rows, max(1, each)):
        yield Rows(first, min(each, rows - first), two_shot)


@cache
def width_of(elements: int, vector: int) -> int:
    """Return the width of the rows that so many adjacent elements are sent as.

    It divides them, and is the largest such multiple of `vector` elements that one row may have.
    """
    vectors = elements // vector
    return vector * next(n for n in range(min(ROW_VECTORS, vectors), 0, -1) if vectors % n == 0)


def fits(x: torch.Tensor, *others: torch.Tensor | None) -> bool:
    """Return whether rows of x [T, H] are sent as they are: whole vectors, not too many.

    `others` are tensors with rows of as many elements, or one such row.
    """
    elements = VECTOR // x.element_size()
    vectors, rest = divmod(x.size(1), elements)
    return (
        rest == 0
        and vectors <= ROW_VECTORS
        and all(other is None or _in_vectors(other, elements) for other in (x, *others))
    )


def _in_vectors(x: torch.Tensor, elements: int) -> bool:
    """Return whether rows of x begin at vectors of so many elements."""
    stride = x.stride(0) if x.dim() > 1 and x.size(0) > 1 else 0
    return x.data_ptr() % (elements * x.element_size()) == 0 and stride % elements == 0


def least_region(size: int) -> int:
    """Return the least vectors of a region, which hold a launch of one row, the longest."""
    return ROW_VECTORS * (size + 2)


def arguments_of(**tensors: torch.Tensor | None) -> dict[str, Any]:
    """Return address and row stride of each tensor [T, H] for a launch, None as null."""
    given: dict[str, Any] = {}
    for name, tensor in tensors.items():
        given[name] = 0 if tensor is None else tensor.data_ptr()
        # Of a single row it may be any number.
        given[f"{name}_stride"] = tensor.stride(0) if tensor is not None and len(tensor) > 1 else 0
    return given
