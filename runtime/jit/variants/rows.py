"""Kernels that take rows one by one, and one that times the L2."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from ..sources import CSRC
from ..targets import HOPPER
from .base import (
    FLOAT_DTYPES,
    OPERAND_DTYPES,
    Variant,
    check,
)

QUANTIZE_KINDS = ("per_token", "rms_norm", "silu_mul")


@dataclass(frozen=True, kw_only=True)
class Quantize(Variant):
    """Rows of 16/32-bit values to 8-bit rows and scales, after an optional norm or activation.

    A norm or activation may also be all there is: then rows keep their dtype.

    Args:
        kind: per_token (as they are), rms_norm (with a residual added before, if given) or
            silu_mul (of [gate | up]).
        in_dtype: of x and the residual.
        out_dtype: int8 or e4m3, or in_dtype (not per_token).
        weight_dtype: of the norm's weight: in_dtype, or fp32.
    """

    family: ClassVar[str] = "quantize"
    source: ClassVar[Path] = CSRC / "gemm_w8a8" / "quantize" / "quantize.cu"
    needs: ClassVar[frozenset[str]] = frozenset()

    kind: str
    in_dtype: str
    out_dtype: str
    weight_dtype: str = ""

    def __post_init__(self) -> None:
        check("kind", self.kind, QUANTIZE_KINDS)
        check("in_dtype", self.in_dtype, FLOAT_DTYPES)
        results = OPERAND_DTYPES if self.kind == "per_token" else (*OPERAND_DTYPES, self.in_dtype)
        check("out_dtype", self.out_dtype, results)
        if not self.weight_dtype:
            object.__setattr__(self, "weight_dtype", self.in_dtype)
        others = ("fp32",) if self.kind == "rms_norm" else ()
        check("weight_dtype", self.weight_dtype, (self.in_dtype, *others))

    @property
    def params(self) -> tuple[Path, ...]:
        return (CSRC / "gemm_w8a8" / "params.h", self.source.with_name("params.h"))

    @property
    def name(self) -> str:
        weight = "" if self.weight_dtype == self.in_dtype else f"-{self.weight_dtype}_weight"
        return f"{self.family}-{self.kind}-{self.in_dtype}-{self.out_dtype}{weight}"

    def defines(self) -> dict[str, str]:
        return {
            "OSTINATO_KIND": self.kind,
            "OSTINATO_IN_DTYPE": self.in_dtype,
            "OSTINATO_OUT_DTYPE": self.out_dtype,
            "OSTINATO_WEIGHT_DTYPE": self.weight_dtype,
        }


@dataclass(frozen=True, kw_only=True)
class AppendKV(Variant):
    """Norm and rotation of q and k, and their way and that of v into the paged cache.

    Args:
        dtype: of q, k and v.
        cache_dtype: of the cache: dtype, int8 or e4m3.
    """

    family: ClassVar[str] = "append_kv"
    source: ClassVar[Path] = CSRC / "attention" / "append" / "append.cu"
    needs: ClassVar[frozenset[str]] = frozenset()

    dtype: str
    cache_dtype: str = ""

    def __post_init__(self) -> None:
        check("dtype", self.dtype, FLOAT_DTYPES)
        if not self.cache_dtype:
            object.__setattr__(self, "cache_dtype", self.dtype)
        check("cache_dtype", self.cache_dtype, (self.dtype, *OPERAND_DTYPES))

    @property
    def name(self) -> str:
        return f"{self.family}-{self.dtype}-{self.cache_dtype}"

    def defines(self) -> dict[str, str]:
        return {"OSTINATO_DTYPE": self.dtype, "OSTINATO_CACHE_DTYPE": self.cache_dtype}


@dataclass(frozen=True, kw_only=True)
class _OfDtype(Variant):
    """A family whose kernels differ in one dtype."""

    dtype: str

    def __post_init__(self) -> None:
        check("dtype", self.dtype, FLOAT_DTYPES)

    @property
    def name(self) -> str:
        return f"{self.family}-{self.dtype}"

    def defines(self) -> dict[str, str]:
        return {"OSTINATO_DTYPE": self.dtype}


@dataclass(frozen=True, kw_only=True)
class Embed(_OfDtype):
    """Rows of the embedding table, and marks of the tokens that were seen.

    Args:
        dtype: of the table.
    """

    family: ClassVar[str] = "embed"
    source: ClassVar[Path] = CSRC / "embed" / "embed.cu"
    needs: ClassVar[frozenset[str]] = frozenset()


@dataclass(frozen=True, kw_only=True)
class L2Probe(Variant):
    """How many clocks SMs take to reach places in the L2."""

    family: ClassVar[str] = "l2_probe"
    source: ClassVar[Path] = CSRC / "l2" / "probe.cu"
    needs: ClassVar[frozenset[str]] = frozenset({HOPPER})

    @property
    def name(self) -> str:
        return f"{self.family}-atomics"

    def defines(self) -> dict[str, str]:
        return {}


@dataclass(frozen=True, kw_only=True)
class MergeStates(_OfDtype):
    """Attention to some keys and attention to others, merged.

    Args:
        dtype: of the outputs.
    """

    family: ClassVar[str] = "merge_states"
    source: ClassVar[Path] = CSRC / "attention" / "merge" / "merge_states.cu"
    needs: ClassVar[frozenset[str]] = frozenset()


@dataclass(frozen=True, kw_only=True)
class Sample(_OfDtype):
    """Tokens from logits: greedy, or drawn after temperature, top-k, top-p and min-p.

    Args:
        dtype: of the logits.
    """

    family: ClassVar[str] = "sample"
    source: ClassVar[Path] = CSRC / "sampling" / "sample.cu"
    needs: ClassVar[frozenset[str]] = frozenset()
