"""Random paged caches and queries, in as many sets as it takes to keep the L2 cold."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..harness.kv_cache import KVLayout, numbers_of, random_cache
from ..harness.pages import partial_pages, random_pages
from ..harness.rotation import num_sets
from .cases import Case

DTYPE = torch.bfloat16  # of queries and results
PLAIN = KVLayout()


@dataclass(frozen=True)
class Layout:
    """Of a paged cache: tokens of a page, and how numbers are stored."""

    page: int
    kv: KVLayout = PLAIN


@dataclass(frozen=True)
class Inputs:
    """Tensors of one launch, of which ours writes `out`; the arguments of `ops.paged_attention`."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    page_table: torch.Tensor
    seq_lens: torch.Tensor
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None
    out: torch.Tensor

    @property
    def page(self) -> int:
        """Tokens of a page."""
        return self.k_cache.size(1)


def random_inputs(case: Case, layout: Layout, device: torch.device) -> list[Inputs]:
    """Return sets of inputs with permuted pages; what follows a sequence's end holds NaN or -128.

    Scales of tokens there are NaN.

    All have one page table and the same lengths, as the layers of a step do.

    Args:
        case: the sizes.
        layout: of the cache.
        device: where they shall lie.
    """
    page = layout.page
    total, table = random_pages(case.lengths, page)
    ends = partial_pages(case.lengths, page, table)
    shape = (total, page, case.heads_kv, case.dim)
    rows = (case.batch * case.q_len, case.heads_q, case.dim)
    table = table.to(device)
    lengths = torch.tensor(case.lengths, dtype=torch.int32).to(device)

    def one_set() -> Inputs:
        k_cache, k_scale = random_cache(shape, layout.kv, ends, device)
        v_cache, v_scale = random_cache(shape, layout.kv, ends, device)
        q = torch.randn(rows, dtype=DTYPE, device=device)
        out = torch.empty_like(q)
        return Inputs(q, k_cache, v_cache, table, lengths, k_scale, v_scale, out)

    num_bytes = case.kv_bytes(1) // case.dim * layout.kv.head_bytes(case.dim)
    return [one_set() for _ in range(num_sets(num_bytes, device))]


def expected(inputs: Inputs, sequence: int, q_len: int) -> torch.Tensor:
    """Return what a sequence's queries get: [q_len, heads_q, dim] fp32."""
    length = int(inputs.seq_lens[sequence])
    pages = inputs.page_table[sequence, : -(-length // inputs.page)].long()
    k = numbers_of(inputs.k_cache, inputs.k_scale, pages)[:length]
    v = numbers_of(inputs.v_cache, inputs.v_scale, pages)[:length]
    q = inputs.q[sequence * q_len : (sequence + 1) * q_len].float()
    group = q.size(1) // k.size(1)
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    logits = torch.einsum("qhd,khd->hqk", q, k) * q.size(2) ** -0.5
    key, query = (torch.arange(n, device=q.device) for n in (length, q_len))
    hidden = key > query[:, None] + length - q_len
    weights = logits.masked_fill_(hidden, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v)
