"""The attention of many queries that is timed, and the spelling of a case."""

from __future__ import annotations

import re
from dataclasses import dataclass

HEADS = (32, 8)
DIM = 128
# Those of the published times; then other dims, masks, pages, chunks of a long text, and one long
# text beside short ones.
DEFAULT_CASES = (
    *("16x1024", "4x4096", "1x16384", "1x32768"),
    *("16x1024 d64", "4x4096 d64", "16x1024 d256", "4x4096 d256"),
    *("4x4096 full", "4x4096 w1024"),
    *("16x1024 p16", "4x4096 p16", "4x4096 p64", "4x4096 p256"),
    *("1x512 kv32768", "1x512 kv32768 p16", "16x8192 skew", "64x128"),
)
# FP8 keys are packed.
FP8_CASES = (
    *("16x1024", "4x4096", "1x16384", "1x32768"),
    *("4x4096 d64", "4x4096 d256", "4x4096 full", "4x4096 w1024"),
    *("1x512 kv32768", "16x8192 skew", "64x128"),
)
# With skewed lengths one sequence is long, and the others are this part of it.
_SKEW = 16
_CASE = re.compile(
    r"(\d+)x(\d+)(?: kv(\d+))?(?: h(\d+)/(\d+))?(?: d(\d+))?"
    r"( full)?(?: w(\d+))?(?: p(\d+))?( skew)?"
)


@dataclass(frozen=True, order=True)
class Case:
    """One call.

    Args:
        batch: sequences.
        queries: of each sequence, its last tokens; with `skew` those of the longest.
        kv: tokens of each sequence; 0 for as many as queries.
        heads_q: query heads, a multiple of `heads_kv`.
        heads_kv: heads of keys and values.
        dim: of a head.
        causal: a query sees no key after its position.
        window: how many keys before its position a query sees; 0 for all.
        page: tokens of a page; 0 for keys that lie packed.
        skew: the first sequence is that long, the others a sixteenth of it.
    """

    batch: int
    queries: int
    kv: int = 0
    heads_q: int = HEADS[0]
    heads_kv: int = HEADS[1]
    dim: int = DIM
    causal: bool = True
    window: int = 0
    page: int = 0
    skew: bool = False

    def __post_init__(self) -> None:
        sizes = (self.batch, self.queries, self.heads_q, self.heads_kv, self.dim)
        if min(sizes) < 1:
            raise ValueError(f"case: got {self}, expected sizes of at least 1")
        if self.heads_q % self.heads_kv:
            raise ValueError(f"case: got {self}, expected heads_q to be a multiple of heads_kv")
        if 0 < self.kv < self.queries:
            raise ValueError(f"case: got {self}, expected no more queries than tokens")
        if self.skew and self.kv:
            raise ValueError(f"case: got {self}, expected skew of texts, not of chunks")

    @staticmethod
    def parse(text: str) -> Case:
        """Return the case that `str` spells so.

        Raises:
            ValueError: when the text spells none.
        """
        match = _CASE.fullmatch(text)
        if match is None:
            raise ValueError(f"case: got {text!r}, expected one like '4x4096' or '4x4096 d64 p16'")
        batch, queries, kv, heads_q, heads_kv, dim, full, window, page, skew = match.groups()
        return Case(
            int(batch),
            int(queries),
            int(kv or 0),
            int(heads_q or HEADS[0]),
            int(heads_kv or HEADS[1]),
            int(dim or DIM),
            causal=full is None,
            window=int(window or 0),
            page=int(page or 0),
            skew=skew is not None,
        )

    def __str__(self) -> str:
        heads = (self.heads_q, self.heads_kv)
        parts = (
            (f" kv{self.kv}", self.kv),
            (f" h{self.heads_q}/{self.heads_kv}", heads != HEADS),
            (f" d{self.dim}", self.dim != DIM),
            (" full", not self.causal),
            (f" w{self.window}", self.window),
            (f" p{self.page}", self.page),
            (" skew", self.skew),
        )
        return f"{self.batch}x{self.queries}" + "".join(text for text, said in parts if said)

    @property
    def q_lens(self) -> list[int]:
        """Queries of each sequence."""
        short = max(self.queries // _SKEW, 1) if self.skew else self.queries
        return [self.queries, *[short] * (self.batch - 1)]

    @property
    def k_lens(self) -> list[int]:
        """Tokens of each sequence."""
        return [self.kv] * self.batch if self.kv else self.q_lens

    @property
    def is_square(self) -> bool:
        """Whether the queries of every sequence are all of its tokens."""
        return self.kv in (0, self.queries)

    @property
    def is_dense(self) -> bool:
        """Whether the sequences, of one length each, make a tensor."""
        return not self.skew and not self.page

    def seen(self, q_len: int, k_len: int) -> int:
        """Return how many keys the queries of a sequence see, all together."""
        stops = [k_len - q_len + i + 1 if self.causal else k_len for i in range(q_len)]
        firsts = [
            max(k_len - q_len + i - self.window, 0) if self.window else 0 for i in range(q_len)
        ]
        return sum(stops) - sum(firsts)

    @property
    def flops(self) -> int:
        """Multiplications and additions of both products, of the keys that each query sees."""
        pairs = zip(self.q_lens, self.k_lens, strict=True)
        return 4 * self.heads_q * self.dim * sum(self.seen(q, k) for q, k in pairs)

    def num_bytes(self, element: int, of_output: int) -> int:
        """Unique bytes read and written, of elements of so many bytes."""
        q_rows, k_rows = sum(self.q_lens) * self.heads_q, sum(self.k_lens) * self.heads_kv
        return self.dim * (q_rows * (element + of_output) + 2 * k_rows * element)

    def num_bytes_over(self, head: int, element: int) -> int:
        """Likewise, with keys and values of so many bytes a head and queries of other elements."""
        q_rows, k_rows = sum(self.q_lens) * self.heads_q, sum(self.k_lens) * self.heads_kv
        return 2 * (self.dim * q_rows * element + k_rows * head)
