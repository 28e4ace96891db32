"""Which partition of a GPU's L2 holds what, and the probe's kernel.

`docs/notebooks/l2_partition.md` has the measurements.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from ...jit.registry import register_family
from ...jit.sources import CSRC
from ...jit.targets import HOPPER
from ...jit.variant import Variant

_SM_WORDS = 8  # csrc/attention/common/params.h: L2Partition::kSmWords
_WORD_BITS = 32
L2_WORDS = _SM_WORDS + 2


@dataclass(frozen=True)
class L2Partition:
    """Where the keys and values of a paged cache are held, seen from the SMs of its GPU.

    A head's keys and values in a page are in partition 0 or 1: the parity of the ones of `page &
    pages` and `head & heads`.

    Args:
        sms: by SM, the partition that it is on; at most 256.
        pages: bits of a page's id that tell.
        heads: bits of a KV head's number that tell, at least one.

    Raises:
        TypeError: for what is no integer.
        ValueError: for a number out of range.
    """

    sms: Sequence[int]
    pages: int
    heads: int
    # As the kernel takes them: an op is called more often than this is made.
    words: list[int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        most = _SM_WORDS * _WORD_BITS
        object.__setattr__(self, "sms", tuple(operator.index(partition) for partition in self.sms))
        for name in ("pages", "heads"):
            object.__setattr__(self, name, operator.index(getattr(self, name)))
        if len(self.sms) > most or any(partition not in (0, 1) for partition in self.sms):
            raise ValueError(
                f"sms: got {len(self.sms)} of {sorted(set(self.sms))}, expected at most {most}, "
                "each 0 or 1"
            )
        for name, least in (("pages", 0), ("heads", 1)):
            value = getattr(self, name)
            if not least <= value < 1 << _WORD_BITS:
                raise ValueError(f"{name}: got {value}, expected {least} to {2**_WORD_BITS - 1}")
        bits = sum(partition << sm for sm, partition in enumerate(self.sms))
        words = [bits >> _WORD_BITS * i & 2**_WORD_BITS - 1 for i in range(_SM_WORDS)]
        object.__setattr__(self, "words", [*words, self.pages, self.heads])

    def partition_of_page(self, page: int) -> int:
        """Return the partition that holds head 0 of a page."""
        return (page & self.pages).bit_count() & 1


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


register_family(L2Probe, [L2Probe()])
