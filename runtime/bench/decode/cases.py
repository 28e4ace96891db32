"""The decode steps of paged attention that are timed, and the spelling of a case."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product

DEFAULT_HEADS = ("32/8", "64/8", "8/1", "32/32")
DEFAULT_BATCH = (1, 8, 32, 40, 128, 256)
DEFAULT_KV = (512, 2048, 8192, 32768)
DEFAULT_PAGES = (16, 64)
DIM = 128
# With skewed lengths one sequence is long, and the others are this part of it.
_SKEW = 16
_HEADS = re.compile(r"(\d+)/(\d+)")
_CASE = re.compile(r"(\d+)/(\d+) b(\d+) kv(\d+)(?: q(\d+))?(?: d(\d+))?( skew)?")


@dataclass(frozen=True, order=True)
class Case:
    """One decode step.

    Args:
        heads_q: query heads, a multiple of `heads_kv`.
        heads_kv: heads of keys and values.
        batch: sequences.
        kv: tokens of each sequence; with `skew` those of the longest.
        q_len: queries of each sequence, its last tokens.
        dim: of a head.
        skew: the first sequence is `kv` long, the others a sixteenth of it.
    """

    heads_q: int
    heads_kv: int
    batch: int
    kv: int
    q_len: int = 1
    dim: int = DIM
    skew: bool = False

    def __post_init__(self) -> None:
        sizes = (self.heads_q, self.heads_kv, self.batch, self.kv, self.q_len, self.dim)
        if min(sizes) < 1:
            raise ValueError(f"case: got {self}, expected sizes of at least 1")
        if self.heads_q % self.heads_kv:
            raise ValueError(f"case: got {self}, expected heads_q to be a multiple of heads_kv")
        if min(self.lengths) < self.q_len:
            raise ValueError(f"case: got {self}, expected no more queries than tokens")

    @staticmethod
    def parse(text: str) -> Case:
        """Return the case that `str` spells so.

        Raises:
            ValueError: when the text spells none.
        """
        match = _CASE.fullmatch(text)
        if match is None:
            raise ValueError(f"case: got {text!r}, expected one like '32/8 b1 kv512'")
        heads_q, heads_kv, batch, kv = map(int, match.groups()[:4])
        q_len, dim, skew = match.groups()[4:]
        sizes = (heads_q, heads_kv, batch, kv)
        return Case(*sizes, int(q_len or 1), int(dim or DIM), skew is not None)

    def __str__(self) -> str:
        text = f"{self.heads_q}/{self.heads_kv} b{self.batch} kv{self.kv}"
        text += f" q{self.q_len}" if self.q_len > 1 else ""
        text += f" d{self.dim}" if self.dim != DIM else ""
        return text + (" skew" if self.skew else "")

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sequence."""
        short = max(self.kv // _SKEW, 1) if self.skew else self.kv
        return [self.kv, *[short] * (self.batch - 1)]

    @property
    def flops(self) -> int:
        """Multiplications and additions of both products, of the keys that each query sees."""
        hidden = self.q_len * (self.q_len - 1) // 2  # by causality
        seen = sum(length * self.q_len - hidden for length in self.lengths)
        return 4 * seen * self.heads_q * self.dim

    def kv_bytes(self, element: int) -> int:
        """Bytes of the keys and values that are read, of elements of so many bytes."""
        return 2 * sum(self.lengths) * self.heads_kv * self.dim * element


def parse_heads(text: str) -> tuple[int, int]:
    """Return the query and KV heads of "Q/KV".

    Raises:
        ValueError: when it is not spelt so, or KV does not divide Q.
    """
    match = _HEADS.fullmatch(text)
    if match is None:
        raise ValueError(f"got {text!r}, expected Q/KV such as 32/8")
    q, kv = map(int, match.groups())
    if kv < 1 or q < 1 or q % kv:
        raise ValueError(f"got {text!r}, expected query heads that are a multiple of the KV heads")
    return q, kv


def cases(
    heads: Iterable[str],
    batches: Iterable[int],
    kvs: Iterable[int],
    *,
    q_lens: Iterable[int] = (1,),
    dims: Iterable[int] = (DIM,),
    skews: Iterable[bool] = (False,),
    max_kv_bytes: float,
) -> list[Case]:
    """Return the cases whose keys and values, of 2 bytes an element, are no more than so much.

    Raises:
        ValueError: for a size that is not positive, or more queries than tokens.
    """
    found = [
        Case(*parse_heads(of), batch, kv, q_len, dim, skew)
        for of, dim, q_len, skew, batch, kv in product(heads, dims, q_lens, skews, batches, kvs)
        if batch > 1 or not skew
    ]
    return [case for case in dict.fromkeys(found) if case.kv_bytes(2) <= max_kv_bytes]
