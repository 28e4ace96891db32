"""What a kernel library is compiled from: one frozen dataclass per family, one instance a library.

A variant is a fixed source file and the macros it is compiled with; the file's head says what each
macro means. Families are declared beside the op that launches them, in `ostinato.ops`, and named
to `ostinato.jit.registry` there.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from .targets import Capability, target_of

# The names that variants and the command line give to torch's dtypes; those of 8 bits first.
OPERAND_DTYPES = ("int8", "e4m3")
FLOAT_DTYPES = ("bf16", "fp16", "fp32")
V = TypeVar("V", bound="Variant")


@dataclass(frozen=True)
class Variant(ABC):
    """What every family has: a source, a name, and the macros that choose the kernel.

    Attributes:
        family: begins the names of all its variants.
        source: the .cu file; its folder has the `params.h` of the struct that a launch takes.
        needs: what a GPU must have for the family's kernels (see `ostinato.jit.targets`).
        name_pattern: what follows the family and a dash in a name, for families of which not all
            variants are listed: a regular expression whose groups are fields, and what a name does
            not say has its default.
    """

    family: ClassVar[str]
    source: ClassVar[Path]
    needs: ClassVar[frozenset[str]]
    name_pattern: ClassVar[str] = ""

    @classmethod
    def supports(cls, capability: Capability) -> bool:
        """Return whether the family has kernels for GPUs of this compute capability."""
        target = target_of(capability)
        return target is not None and cls.needs <= target.features

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

    @classmethod
    def from_name(cls: type[V], name: str) -> V | None:
        """Return the variant of this name, None where `name_pattern` gives none."""
        match = re.fullmatch(f"{cls.family}-{cls.name_pattern}", name, re.ASCII)
        if not cls.name_pattern or match is None:
            return None
        groups = {
            field: int(text) if text.isdecimal() else text
            for field, text in match.groupdict().items()
            if text is not None
        }
        try:
            variant = cls(**cls.fields_of(groups))
        except ValueError:
            return None
        # A variant has one name: d080 is none of d80's.
        return variant if variant.name == name else None

    @staticmethod
    def fields_of(groups: dict[str, Any]) -> dict[str, Any]:
        """Return the fields that the groups of `name_pattern` stand for: by default the same."""
        return groups


@dataclass(frozen=True, kw_only=True)
class OneDtypeVariant(Variant):
    """A family whose kernels differ in one dtype, which their names and macros say.

    Args:
        dtype: one of `FLOAT_DTYPES`.
    """

    dtype: str

    def __post_init__(self) -> None:
        check("dtype", self.dtype, FLOAT_DTYPES)

    @property
    def name(self) -> str:
        return f"{self.family}-{self.dtype}"

    def defines(self) -> dict[str, str]:
        return {"OSTINATO_DTYPE": self.dtype}


def check(name: str, got: object, expected: tuple[object, ...]) -> None:
    """Refuse a field's value that is not one of those expected."""
    if got not in expected:
        raise ValueError(f"{name}: got {got!r}, expected {' or '.join(map(repr, expected))}")
