"""Attention to a paged KV cache: decode, chunked prefill, and both in one batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch

from ..common import checks
from ..common.torch_library import register
from . import checks as attention_checks
from . import decode_cuda, dequantize_kv, prefill_cuda
from .batch_torch import attend_capacity
from .cpu_attention import attend_live
from .kv_view import PagedKV
from .l2_partition import L2Partition
from .softmax_torch import LogitRule


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    cu_seqlens_q: torch.Tensor | None = None,
    max_seqlen_q: int = 1,
    max_tokens_k: int | None = None,
    scale: float | None = None,
    causal: bool = True,
    window: tuple[int, int] | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    return_lse: bool = False,
    workspace: torch.Tensor | None = None,
    batch_invariant: bool = False,
    check_bounds: bool = False,
    l2_partition: L2Partition | None = None,
    stream: checks.Stream = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attend to keys and values in a paged cache: decode, chunked prefill, or a mixed batch.

    out = softmax(logits)·V with logits = scale·q·Kᵀ (Vaswani et al., "Attention Is All You Need",
    2017), for each query over the keys it sees. A sequence's queries are its last tokens: query i
    of Lq stands at key position Lk - Lq + i, where Lk is from `seq_lens`. If `causal` it sees no
    key after its own position; with `window` only those from position - left to position + right.
    Query head h reads KV head h // (heads_q // heads_kv). A query that sees no key gets out = 0 and
    LSE = -inf.

    A key that a query does not see has no part in its result, whatever it holds, NaN included. Nor
    is anything read from slots past a sequence's length, pages in no table, or table entries that
    are past its last page or, with `window`, before the first page that its queries see: those may
    hold any id. Rows of `out` that belong to no sequence are left as they are, or zero if `out` is
    None.

    Args:
        q: [tokens, heads_q, dim] bf16, fp16 or fp32.
        k_cache: [pages, page_size, heads_kv, dim] of q's dtype, int8 or e4m3.
        v_cache: [pages, page_size, heads_kv, value_dim], else like k_cache; the value dim is any,
            mostly dim.
        page_table: [batch, max_pages] int32, the page ids of each sequence.
        seq_lens: [batch] int32, each sequence's tokens in the cache, those of this call's q
            included; clamped to 0 .. max_pages * page_size.
        cu_seqlens_q: [batch + 1] int32, where each sequence's rows of q begin and end; rows in
            front of the first and behind the last belong to none, and of a given `out` they are
            not written. None: each sequence has exactly `max_seqlen_q` rows.
        max_seqlen_q: capacity, the most rows of q that one sequence may have.
        max_tokens_k: capacity, the most tokens that all sequences which have queries have together;
            None: batch * max_pages * page_size. On CUDA the workspace of more queries than decode
            steps have holds so many of an int8 or e4m3 cache in 16 bits; nothing else needs it.
        scale: factor of q·k; None is 1/sqrt(dim).
        causal: hide the keys after the query's position.
        window: (left, right), each at least 0, or -1 for no limit.
        softcap: s > 0 turns each logit into s·tanh(logit / s); 0 does nothing.
        sinks: [heads_q] fp32, finite or -inf: one more logit in each head's softmax denominator,
            without a value.
        k_scale: fp32 factor of an int8 or e4m3 k_cache, and only then: a scalar, [heads_kv] or
            [pages, page_size, heads_kv] with any strides.
            On CUDA more queries than decode steps have attend to products that are rounded to q's
            dtype, as a cache of that dtype would hold them.
        v_scale: likewise of v_cache; at least 0 if it or k_scale is [pages, page_size, heads_kv].
        out: [tokens, heads_q, value_dim] of q's dtype, written and returned; allocated when None.
        return_lse: return the LSE too.
        workspace: [bytes] uint8, scratch memory on q's device: as many bytes as
            `paged_attention_workspace` says, at an address that is a multiple of 16. Zero before
            its first use, and with `l2_partition` before the kernel in front of that is launched;
            launches that may run at once need one each. None: one that is kept for the stream, or
            for the graphs of one memory pool that are captured on it, as long as they live.
        batch_invariant: make the bits of a row on CUDA independent of the other sequences, at a
            price: decode steps split each sequence after every 1024 tokens that it sees, whatever
            the load, so that a few sequences shorter than that may keep few SMs busy; where there
            are more queries, or `cu_seqlens_q`, the heads of a group do not share the rows of a
            tile, which short sequences then leave empty. With `cu_seqlens_q` it does not matter
            either how a sequence was cut into chunks, if every cut is at a multiple of 384 tokens
            (128 where the dim is above 64). On the CPU bits depend on none of this in any case.
        check_bounds: check lengths, offsets and the page ids that are read, which the host must
            see for it. Without it offsets are checked on the CPU only, a page id out of range is an
            IndexError on the CPU, and on CUDA either is undefined.
        l2_partition: which partition of the GPU's L2 holds which pages, as `PagedKVCache` knows it
            of its own. A hint: steps of many sequences read more cheaply by it, the result does not
            depend on it. The first entry of each row of `page_table` is read then, whatever it is,
            and must not change meanwhile.
        stream: see `ostinato.ops`.

    Returns:
        out, or (out, lse) with lse [tokens, heads_q] fp32: the natural logarithm of the softmax
        denominator, sink included.

    Raises:
        TypeError, ValueError: naming the argument, before anything is written.
    """
    attention_checks.paged(q, k_cache, v_cache, page_table, seq_lens, cu_seqlens_q, max_seqlen_q)
    attention_checks.scales(k_cache, k_scale, v_scale)
    value_dim = v_cache.size(3)
    rule = attention_checks.options(
        q, value_dim, scale, causal, window, softcap, sinks, out, workspace
    )
    if max_tokens_k is not None:
        checks.integer("max_tokens_k", max_tokens_k, least=1)
    checks.flag("batch_invariant", batch_invariant)
    checks.flag("check_bounds", check_bounds)
    if l2_partition is not None and not isinstance(l2_partition, L2Partition):
        raise TypeError(
            f"l2_partition: got {type(l2_partition).__name__}, expected an L2Partition or None"
        )
    with checks.launch_stream(stream, q.device):
        if out is None:
            out = torch.empty((*q.shape[:2], value_dim), dtype=q.dtype, device=q.device)
            if cu_seqlens_q is not None:  # some rows may belong to no sequence
                out.zero_()
        lse = None
        if return_lse:
            lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
            if cu_seqlens_q is not None:
                lse.fill_(-math.inf)
        _paged_attention_op(
            q,
            k_cache,
            v_cache,
            page_table,
            seq_lens,
            cu_seqlens_q,
            min(max_seqlen_q, checks.INT32_MAX),  # and in the op to q's rows, which may be a symbol
            max_tokens_k,
            *rule,
            sinks,
            k_scale,
            v_scale,
            batch_invariant,
            check_bounds,
            out,
            lse,
            workspace,
            [] if l2_partition is None else l2_partition.words,
        )
    return out if lse is None else (out, lse)


def _paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None,
    max_seqlen_q: int,
    max_tokens_k: int | None,
    scale: float,
    causal: bool,
    left: int,
    right: int,
    softcap: float,
    sinks: torch.Tensor | None,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    batch_invariant: bool,
    check_bounds: bool,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    workspace: torch.Tensor | None,
    l2_partition: Sequence[int],
) -> None:
    max_seqlen_q = min(max_seqlen_q, q.size(0))
    kv = PagedKV(k_cache, v_cache, k_scale, v_scale, page_table)
    rule = LogitRule(scale, causal, left, right, softcap)
    capacity = page_table.size(1) * k_cache.size(1)
    batch = seq_lens.size(0)
    on_cpu = q.device.type == "cpu"
    if on_cpu or check_bounds:
        bounds = [b * max_seqlen_q for b in range(batch + 1)]
        if cu_seqlens_q is not None:
            bounds = attention_checks.offsets(
                "cu_seqlens_q", cu_seqlens_q, q.size(0), max_seqlen_q, from_zero=False
            )
        if check_bounds:
            q_lens = [stop - start for start, stop in pairwise(bounds)]
            attention_checks.pages(k_cache, page_table, seq_lens, q_lens, rule, max_tokens_k)
    if on_cpu:
        k_lens = [min(max(length, 0), capacity) for length in seq_lens.tolist()]
        attend_live(q, bounds, k_lens, kv, rule, sinks, out, lse)
        return
    given = (q, k_cache, v_cache, page_table, seq_lens, cu_seqlens_q, max_seqlen_q, rule, sinks)
    # How the decode kernel splits a sequence depends on how many queries it has.
    if cu_seqlens_q is None or not batch_invariant:
        decode = decode_cuda.variant(
            q, k_cache, v_cache, page_table, max_seqlen_q, batch_invariant, out
        )
        if decode is not None:
            decode_cuda.attend(decode, *given, k_scale, v_scale, out, lse, workspace, l2_partition)
            return
    if k_scale is not None and v_scale is not None:
        tokens = batch * capacity if max_tokens_k is None else min(max_tokens_k, batch * capacity)
        prefill = dequantize_kv.variant(
            *(q, k_cache, v_cache, out, batch, max_seqlen_q),
            tokens=tokens,
            batch_invariant=batch_invariant,
        )
        if prefill is not None:
            quantized = dequantize_kv.QuantizedKV(k_cache, v_cache, k_scale, v_scale)
            dequantize_kv.attend_paged(
                *(prefill, q, quantized, page_table, seq_lens, cu_seqlens_q, max_seqlen_q, tokens),
                *(rule, sinks, batch_invariant, out, lse, workspace),
            )
            return
    prefill = prefill_cuda.paged_variant(
        q, k_cache, v_cache, page_table, out, max_seqlen_q, batch_invariant
    )
    if prefill is not None:
        prefill_cuda.attend_paged(prefill, *given, batch_invariant, out, lse, workspace)
        return
    if cu_seqlens_q is None:
        cu_seqlens_q = torch.arange(batch + 1, device=q.device) * max_seqlen_q
    k_lens_device = seq_lens.clamp(0, capacity)
    attend_capacity(
        q, cu_seqlens_q, max_seqlen_q, k_lens_device, capacity, kv, rule, sinks, out, lse
    )


_paged_attention_op = register(
    "paged_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor page_table, Tensor seq_lens, "
    "Tensor? cu_seqlens_q, SymInt max_seqlen_q, SymInt? max_tokens_k, float scale, bool causal, "
    "int left, int right, "
    "float softcap, Tensor? sinks, Tensor? k_scale, Tensor? v_scale, bool batch_invariant, "
    "bool check_bounds, Tensor(a!) out, Tensor(b!)? lse, Tensor(c!)? workspace, "
    "int[] l2_partition) -> ()",
    _paged_attention,
)
