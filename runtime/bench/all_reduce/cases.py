"""The sums over ranks that are timed."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product

import torch

# What follows the sum: nothing; or the residual, the RMS norm and quantisation per token.
FORMS = {"sum": None, "int8": torch.int8, "fp8": torch.float8_e4m3fn}
_CASE = re.compile(r"tp(\d+) M(\d+) H(\d+) (\w+)", re.ASCII)


@dataclass(frozen=True, order=True)
class Case:
    """Rows [M, H] in bf16 of each rank that are added up.

    Args:
        ranks: how many.
        m: rows.
        hidden: H.
        form: one of `FORMS`.
    """

    ranks: int
    m: int
    hidden: int
    form: str

    def __post_init__(self) -> None:
        if min(self.ranks, self.m, self.hidden) < 1 or self.form not in FORMS:
            raise ValueError(f"case: got {self}, expected sizes of at least 1 and {list(FORMS)}")

    @staticmethod
    def parse(text: str) -> Case:
        """Return the case that `str` spells so.

        Raises:
            ValueError: when the text spells none.
        """
        match = _CASE.fullmatch(text)
        if match is None:
            raise ValueError(f"case: got {text!r}, expected one like 'tp4 M16 H8192 int8'")
        ranks, m, hidden = map(int, match.groups()[:3])
        return Case(ranks, m, hidden, match.group(4))

    def __str__(self) -> str:
        return f"tp{self.ranks} M{self.m} H{self.hidden} {self.form}"

    @property
    def num_bytes(self) -> int:
        """Bytes of a rank's rows, twice the part of them that others need or have."""
        return 2 * (self.ranks - 1) * self.m * self.hidden * 2 // self.ranks

    @property
    def flops(self) -> int:
        """Additions."""
        return (self.ranks - 1) * self.m * self.hidden


def cases(ranks: int, rows: Iterable[int], hidden: int, forms: Iterable[str]) -> list[Case]:
    """Return all cases of these, in order of their rows.

    Raises:
        ValueError: for a number below 1.
    """
    return [Case(ranks, m, hidden, form) for m, form in product(sorted(set(rows)), forms)]
