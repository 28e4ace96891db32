"""Random queries, and keys and values packed or in pages, in sets that keep the L2 cold."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch

from ..harness.kv_cache import KVLayout, numbers_of, random_cache
from ..harness.pages import partial_pages, random_pages
from ..harness.rotation import num_sets
from .cases import Case

DTYPE = torch.bfloat16
FP8 = torch.float8_e4m3fn
# Of a sequence's queries those whose results are checked: so many at either end.
CHECKED_ROWS = 64


@dataclass(frozen=True)
class Inputs:
    """Tensors of one launch; ours writes `out`.

    Args:
        q: [total_q, heads_q, dim].
        k: [total_k, heads_kv, dim], or with a table [pages, page, heads_kv, dim].
        v: like k.
        cu_seqlens_q: [batch + 1] int32.
        cu_seqlens_k: likewise.
        seq_lens: [batch] int32, the tokens of each sequence.
        table: [batch, pages of the longest] int32, or None for packed keys.
        out: like q, bf16.
        scales: of packed FP8 tensors: [batch, heads_kv] fp32 ones.
        k_scale: of keys in 8-bit pages beside 16-bit queries, as of `ops.paged_attention`.
        v_scale: likewise of values.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    seq_lens: torch.Tensor
    table: torch.Tensor | None
    out: torch.Tensor
    scales: torch.Tensor | None = None
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None

    def tokens(self, sequence: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and values of a sequence, [tokens, heads_kv, dim]."""
        begin, end = self.cu_seqlens_k[sequence : sequence + 2].tolist()
        if self.table is None:
            return self.k[begin:end], self.v[begin:end]
        pages = self.table[sequence, : -(-(end - begin) // self.k.size(1))].long()
        if self.k_scale is None:
            k, v = (x[pages].flatten(0, 1)[: end - begin] for x in (self.k, self.v))
            return k, v
        k = numbers_of(self.k, self.k_scale, pages)
        v = numbers_of(self.v, self.v_scale, pages)
        return k[: end - begin], v[: end - begin]


def random_inputs(case: Case, layout: torch.dtype | KVLayout, device: torch.device) -> list[Inputs]:
    """Return sets of inputs with permuted pages; what follows a sequence's end there is NaN.

    All have one table and the same lengths, as the layers of a model do.

    Args:
        case: the sizes.
        layout: the dtype of queries, keys and values, or how pages store keys and values in 8 bits.
        device: where they shall lie.
    """
    dtype = DTYPE if isinstance(layout, KVLayout) else layout
    if isinstance(layout, KVLayout) and not case.page:
        raise ValueError("8-bit keys beside 16-bit queries are in pages")

    def offsets(lengths: list[int]) -> torch.Tensor:
        return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32).to(device)

    keys_shape, table = _pages(case, device)
    lengths = torch.tensor(case.k_lens, dtype=torch.int32).to(device)
    cu_q, cu_k = offsets(case.q_lens), offsets(case.k_lens)
    ends = [] if table is None else partial_pages(case.k_lens, case.page, table)

    def one_set() -> Inputs:
        q = torch.randn(sum(case.q_lens), case.heads_q, case.dim, dtype=DTYPE, device=device)
        out = torch.empty_like(q)
        if isinstance(layout, KVLayout):
            k, k_scale = random_cache(keys_shape, layout, ends, device)
            v, v_scale = random_cache(keys_shape, layout, ends, device)
            where = (cu_q, cu_k, lengths, table)
            return Inputs(q, k, v, *where, out, k_scale=k_scale, v_scale=v_scale)
        k, v = (torch.randn(keys_shape, dtype=DTYPE, device=device) for _ in "kv")
        for page, end in ends:
            k[page, end:] = v[page, end:] = torch.nan
        q, k, v = (x.to(dtype) for x in (q, k, v))
        return Inputs(q, k, v, cu_q, cu_k, lengths, table, out, scales)

    ones = torch.ones(case.batch, case.heads_kv, device=device)
    scales = ones if dtype is FP8 else None
    # At least two: where the L2 holds none a second one costs nothing.
    num_bytes = case.num_bytes(dtype.itemsize, DTYPE.itemsize)
    if isinstance(layout, KVLayout):
        num_bytes = case.num_bytes_over(layout.head_bytes(case.dim), DTYPE.itemsize)
    count = max(num_sets(num_bytes, device), 2)
    return [one_set() for _ in range(count)]


def _pages(case: Case, device: torch.device) -> tuple[tuple[int, ...], torch.Tensor | None]:
    """Return the shape of keys and values, and the table of their pages if there are any."""
    head = (case.heads_kv, case.dim)
    if not case.page:
        return (sum(case.k_lens), *head), None
    total, table = random_pages(case.k_lens, case.page)
    return (total, case.page, *head), table.to(device)


def expected(inputs: Inputs, case: Case, sequence: int, rows: torch.Tensor) -> torch.Tensor:
    """Return what some queries of a sequence get: [rows, heads_q, dim] fp32.

    Args:
        inputs: what is attended to.
        case: its sizes.
        sequence: which.
        rows: indices among the sequence's queries.
    """
    k, v = (x.float() for x in inputs.tokens(sequence))
    begin, end = inputs.cu_seqlens_q[sequence : sequence + 2].tolist()
    q = inputs.q[begin:end][rows].float()
    positions = (k.size(0) - (end - begin) + rows)[:, None]
    key = torch.arange(k.size(0), device=q.device)
    seen = torch.ones(len(rows), k.size(0), dtype=torch.bool, device=q.device)
    if case.causal:
        seen &= key <= positions
    if case.window:
        seen &= key >= positions - case.window
    by_head = q.unflatten(1, (case.heads_kv, -1))
    logits = torch.einsum("qhgd,khd->hgqk", by_head, k) * case.dim**-0.5
    weights = logits.masked_fill_(~seen, -torch.inf).softmax(-1)
    return torch.einsum("hgqk,khd->qhgd", weights, v).flatten(1, 2)


def checked_rows(q_len: int, device: torch.device) -> torch.Tensor:
    """Return which queries of a sequence are checked."""
    head = torch.arange(min(CHECKED_ROWS, q_len), device=device)
    tail = torch.arange(max(q_len - CHECKED_ROWS, len(head)), q_len, device=device)
    return torch.cat([head, tail])
