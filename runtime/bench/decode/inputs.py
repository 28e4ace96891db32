"""Random paged caches and queries, in as many sets as it takes to keep the L2 cold."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...ops.common.e4m3 import as_bytes, to_float32
from ..harness.pages import partial_pages, random_pages
from ..harness.rotation import num_sets
from .cases import Case

KV_DTYPES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn, "int8": torch.int8}
DTYPE = torch.bfloat16  # of queries and results
# Values are about normal, whatever their codes.
_SCALES = {"fp8": 0.5, "int8": 1 / 40}


@dataclass(frozen=True)
class Layout:
    """Of a paged cache: tokens of a page, and the dtype, in `KV_DTYPES`."""

    page: int
    kv_dtype: str = "bf16"


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

    All have one page table and the same lengths, as the layers of a step do.

    Args:
        case: the sizes.
        layout: of the cache.
        device: where they shall lie.
    """
    page, kv_dtype = layout.page, layout.kv_dtype
    total, table = random_pages(case.lengths, page)
    ends = partial_pages(case.lengths, page, table)
    shape = (total, page, case.heads_kv, case.dim)
    rows = (case.batch * case.q_len, case.heads_q, case.dim)
    table = table.to(device)
    lengths = torch.tensor(case.lengths, dtype=torch.int32).to(device)

    def one_set() -> Inputs:
        k_cache, v_cache = (_cache(shape, kv_dtype, device) for _ in "kv")
        for last, end in ends:
            for cache in (k_cache, v_cache):
                cache[last, end:] = -128 if kv_dtype == "int8" else torch.nan
        q = torch.randn(rows, dtype=DTYPE, device=device)
        value = _SCALES.get(kv_dtype)
        k_scale, v_scale = (
            None if value is None else torch.tensor(value, device=device) for _ in "kv"
        )
        out = torch.empty_like(q)
        return Inputs(q, k_cache, v_cache, table, lengths, k_scale, v_scale, out)

    element = KV_DTYPES[kv_dtype].itemsize
    return [one_set() for _ in range(num_sets(case.kv_bytes(element), device))]


def _cache(shape: tuple[int, ...], kv_dtype: str, device: torch.device) -> torch.Tensor:
    cache = torch.empty(shape, dtype=KV_DTYPES[kv_dtype], device=device)
    for pages in cache.split(max(1, 2**26 // cache[0].numel())):  # fp32 of a part at a time
        values = torch.randn(pages.shape, device=device) / _SCALES.get(kv_dtype, 1.0)
        pages.copy_(values.round_().clamp_(-127, 127) if kv_dtype == "int8" else values)
    return cache


def expected(inputs: Inputs, sequence: int, q_len: int) -> torch.Tensor:
    """Return what a sequence's queries get: [q_len, heads_q, dim] fp32."""
    length = int(inputs.seq_lens[sequence])
    pages = inputs.page_table[sequence, : -(-length // inputs.page)].long()
    k, v = (
        to_float32(as_bytes(cache)[pages].view(cache.dtype)).flatten(0, 1)[:length]
        * (1.0 if scale is None else scale)
        for cache, scale in (
            (inputs.k_cache, inputs.k_scale),
            (inputs.v_cache, inputs.v_scale),
        )
    )
    q = inputs.q[sequence * q_len : (sequence + 1) * q_len].float()
    group = q.size(1) // k.size(1)
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    logits = torch.einsum("qhd,khd->hqk", q, k) * q.size(2) ** -0.5
    key, query = (torch.arange(n, device=q.device) for n in (length, q_len))
    hidden = key > query[:, None] + length - q_len
    weights = logits.masked_fill_(hidden, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v)
