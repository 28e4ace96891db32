"""Attention over a batch by torch's operators on CUDA, where the host knows no length.

The bits of a query's result depend on the query and the keys it sees and on nothing else: neither
on other sequences, nor on how a sequence is cut into chunks, nor on capacities.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ..common.precision import full_precision
from .kv_view import KV
from .softmax_torch import LogitRule, attend

# Work is cut into tiles of these shapes.
QUERY_TILE = 64
KEY_TILE = 1024


def attend_capacity(
    q: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    max_seqlen_q: int,
    k_lens: torch.Tensor,
    max_seqlen_k: int,
    kv: KV,
    rule: LogitRule,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    """Attend without reading a length on the host: every capacity is worked through.

    The arguments are those of `cpu_attention.attend_live`, with bounds and lengths as tensors on
    q's device.
    """
    tokens = q.size(0)
    if tokens == 0:
        return
    full_precision(q.device)
    # Rows of a tile that are no token's are written to a row of their own, after all others.
    out_rows = torch.cat([out, out.new_empty(1, *out.shape[1:])])
    lse_rows = q.new_empty(tokens + 1, q.size(1), dtype=torch.float32)
    if lse is not None:
        lse_rows[:tokens] = lse
    for b in range(k_lens.size(0)):
        begin, k_len = cu_seqlens_q[b], k_lens[b]
        q_len = (cu_seqlens_q[b + 1] - begin).clamp(0, max_seqlen_q)
        for query_tile in range(0, max_seqlen_q, QUERY_TILE):
            index = torch.arange(query_tile, query_tile + QUERY_TILE, device=q.device)
            surplus = index >= q_len
            queries = q.index_select(0, (begin + index).masked_fill_(surplus, 0)).float()
            first, stop = rule.spans(k_len - q_len + index, k_len)
            stop = stop.masked_fill(surplus, 0)
            tiles = _tiles(kv, b, first, stop, max_seqlen_k)
            result, logsumexp = attend(queries, tiles, out.size(2), rule, sinks)
            empty = (stop <= first).unsqueeze(1)
            row = (begin + index).masked_fill_(surplus, tokens)
            result = result.masked_fill(empty.unsqueeze(2), 0.0)
            out_rows.index_copy_(0, row, result.to(out.dtype))
            lse_rows.index_copy_(0, row, logsumexp.masked_fill(empty, float("-inf")))
    out.copy_(out_rows[:tokens])
    if lse is not None:
        lse.copy_(lse_rows[:tokens])


def _tiles(
    kv: KV, b: int, first: torch.Tensor, stop: torch.Tensor, max_seqlen_k: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Yield sequence b's keys and values in tiles, each with the rows that see them.

    A row sees the keys first .. stop - 1, both [rows].
    """
    for start in range(0, max_seqlen_k, KEY_TILE):
        position = torch.arange(start, start + KEY_TILE, device=first.device)
        seen = (position >= first.unsqueeze(1)) & (position < stop.unsqueeze(1))
        yield *kv.tile(b, position, seen.any(dim=0)), seen
