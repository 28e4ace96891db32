"""What all variants have: a source, a name, macros; and the names of dtypes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from pathlib import Path
from typing import ClassVar

from ..targets import Capability, target_of

# The names that variants and the command line give to torch's dtypes; those of 8 bits first.
OPERAND_DTYPES = ("int8", "e4m3")
FLOAT_DTYPES = ("bf16", "fp16", "fp32")


@dataclass(frozen=True)
class Variant(ABC):
    """What every family has: a source, a name, and the macros that choose the kernel.

    `needs` is what a GPU must have for the family's kernels (see `ostinato.jit.targets`).
    """

    family: ClassVar[str]
    source: ClassVar[Path]
    needs: ClassVar[frozenset[str]]

    @classmethod
    def supports(cls, capability: Capability) -> bool:
        """Return whether the family has kernels for GPUs of this compute capability."""
        target = target_of(capability)
        return target is not None and cls.needs <= target.features

    @property
    def params(self) -> tuple[Path, ...]:
        """The headers of the struct that its launch takes."""
        found = self.source.with_name("params.h")
        above = found.parents[1]
        shared = (above / "common" / "params.h", above / "params.h")
        return (next(path for path in (found, *shared) if path.exists()),)

    @property
    @abstractmethod
    def name(self) -> str:
        """The family and the field values, unique among all variants."""

    @abstractmethod
    def defines(self) -> dict[str, str]:
        """Return the macros, without -D."""

    def dtypes(self) -> set[str]:
        """Return the names of all dtypes that the kernel reads or writes."""
        known = (*OPERAND_DTYPES, *FLOAT_DTYPES)
        names = ("dtype", *(f.name for f in fields(self)))  # a family of one dtype has no field
        return {value for name in names if (value := getattr(self, name, None)) in known}


def check(name: str, got: object, expected: tuple[object, ...]) -> None:
    """Refuse a field's value that is not one of those expected."""
    if got not in expected:
        raise ValueError(f"{name}: got {got!r}, expected {' or '.join(map(repr, expected))}")
