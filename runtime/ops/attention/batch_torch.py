"""Attention over a batch: by live lengths on the CPU, by capacities on CUDA.

Either way the bits of a query's result depend on the query and the keys it sees and on nothing
else: neither on other sequences, nor on how a sequence is cut into chunks, nor on capacities.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn import functional

from ..common.precision import full_precision
from .kv_view import KV
from .softmax_torch import LogitRule, attend

# On CUDA the host knows no length, so that work is cut into tiles of these shapes.
QUERY_TILE = 64
KEY_TILE = 1024


def attend_live(
    q: torch.Tensor,
    q_bounds: list[int],
    k_lens: list[int],
    kv: KV,
    rule: LogitRule,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    """Attend on the CPU, one query at a time, reading only what is live.

    Sequence b has the rows q_bounds[b] .. q_bounds[b + 1] - 1 of q [tokens, heads_q, dim] and
    k_lens[b] keys. Rows of `out` (and `lse` [tokens, heads_q]) of no sequence stay as they are.
    """
    full_precision(q.device)
    fused = rule.softcap == 0 and sinks is None
    for b, k_len in enumerate(k_lens):
        begin, end = q_bounds[b], q_bounds[b + 1]
        if begin == end:
            continue
        position = k_len - (end - begin)
        origin = min(rule.span(position, k_len)[0], k_len)
        keys, values = kv.live(b, origin, k_len)
        for row in range(begin, end):
            first, stop = rule.span(position + row - begin, k_len)
            if first >= stop:
                out[row] = 0.0
                if lse is not None:
                    lse[row] = float("-inf")
                continue
            # Copies, because where operands start in memory may steer a library.
            k, v = keys[first - origin : stop - origin], values[first - origin : stop - origin]
            if first > origin:
                k, v = k.clone(), v.clone()
            query = q[row].to(torch.float32, copy=True, memory_format=torch.contiguous_format)
            if fused:
                out[row] = _scaled_dot_product(query, k, v, rule.scale)
                if lse is None:
                    continue
            result, logsumexp = attend(query.unsqueeze(0), [(k, v, None)], v.size(2), rule, sinks)
            if not fused:
                out[row] = result[0]
            if lse is not None:
                lse[row] = logsumexp[0]


def _scaled_dot_product(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
) -> torch.Tensor:
    """Return the attention [heads_q, value_dim] of q [heads_q, dim] to all of k and v.

    These are [T, heads_kv, dim] and [T, heads_kv, value_dim].
    """
    # The heads that share a KV head are the rows of one matrix.
    group = q.view(1, k.size(1), -1, q.size(1))
    keys, values = k.transpose(0, 1).unsqueeze(0), v.transpose(0, 1).unsqueeze(0)
    out = functional.scaled_dot_product_attention(group, keys, values, scale=scale)
    return out.view(q.size(0), v.size(2))


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
    """Attend on CUDA without reading a length on the host: every capacity is worked through.

    The arguments are those of `attend_live`, with bounds and lengths as tensors on q's device.
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
