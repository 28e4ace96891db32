"""Attention to packed keys and values of varying lengths."""

from __future__ import annotations

from itertools import pairwise
from typing import Literal, overload

import torch

from ostinato.ops import attention_checks, checks, prefill_launch
from ostinato.ops.attend import LogitRule
from ostinato.ops.kv import PackedKV
from ostinato.ops.library import register
from ostinato.ops.precision import full_precision
from ostinato.ops.sequences import attend_capacity, attend_live


@overload
def varlen_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    scale: float | None = None,
    causal: bool = True,
    window: tuple[int, int] | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    return_lse: Literal[False] = False,
    workspace: torch.Tensor | None = None,
    check_bounds: bool = False,
    stream: checks.Stream = None,
) -> torch.Tensor: ...
@overload
def varlen_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    scale: float | None = None,
    causal: bool = True,
    window: tuple[int, int] | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    return_lse: Literal[True],
    workspace: torch.Tensor | None = None,
    check_bounds: bool = False,
    stream: checks.Stream = None,
) -> tuple[torch.Tensor, torch.Tensor]: ...
def varlen_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
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
    check_bounds: bool = False,
    stream: checks.Stream = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attend to keys and values that lie packed, one sequence after the other.

    Arithmetic, positions, masks and queries without keys are those of `paged_attention`; Lq and Lk
    are a sequence's lengths in q and in k. So are the arguments, but for these:

    - q: [total_q, heads_q, dim] bf16, fp16 or fp32.
    - k, v: [total_k, heads_kv, dim] of q's dtype, int8 or e4m3.
    - cu_seqlens_q, cu_seqlens_k: [batch + 1] int32, where each sequence begins and ends.
    - max_seqlen_q, max_seqlen_k: capacities, the most rows that one sequence may have.
    - k_scale, v_scale: fp32 factors of int8 or e4m3 keys and values, and only of them: a scalar,
      [heads_kv] or [total_k, heads_kv].
    - check_bounds: check the offsets, which reads them on the host; the CPU always does.

    Returns:
        out [total_q, heads_q, dim], or (out, lse) with lse [total_q, heads_q] fp32.

    Raises:
        TypeError, ValueError: naming the argument, before anything is written.
    """
    attention_checks.varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    attention_checks.scales(k, k_scale, v_scale)
    rule = attention_checks.options(q, scale, causal, window, softcap, sinks, out, workspace)
    checks.flag("check_bounds", check_bounds)
    with checks.launch_stream(stream, q.device):
        if out is None:
            out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
        lse = None
        if return_lse:
            lse = torch.full(q.shape[:2], float("-inf"), dtype=torch.float32, device=q.device)
        _varlen_attention_op(
            q,
            k,
            v,
            cu_seqlens_q,
            cu_seqlens_k,
            min(max_seqlen_q, q.size(0)),
            min(max_seqlen_k, k.size(0)),
            *rule,
            sinks,
            k_scale,
            v_scale,
            check_bounds,
            out,
            lse,
        )
    return out if lse is None else (out, lse)


def _varlen_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scale: float,
    causal: bool,
    left: int,
    right: int,
    softcap: float,
    sinks: torch.Tensor | None,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    check_bounds: bool,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    full_precision(q.device)
    rule = LogitRule(scale, causal, left, right, softcap)
    kv = PackedKV(k, v, k_scale, v_scale, cu_seqlens_k)
    on_cpu = q.device.type == "cpu"
    if on_cpu or check_bounds:
        q_bounds = attention_checks.offsets("cu_seqlens_q", cu_seqlens_q, q.size(0), max_seqlen_q)
        k_bounds = attention_checks.offsets("cu_seqlens_k", cu_seqlens_k, k.size(0), max_seqlen_k)
    if on_cpu:
        lengths = [stop - start for start, stop in pairwise(k_bounds)]
        attend_live(q, q_bounds, lengths, kv, rule, sinks, out, lse)
        return
    kernel = prefill_launch.packed_variant(q, k, v, out)
    if kernel is not None:
        prefill_launch.attend_packed(
            kernel,
            q,
            k,
            v,
            cu_seqlens_q,
            cu_seqlens_k,
            max_seqlen_q,
            max_seqlen_k,
            rule,
            sinks,
            out,
            lse,
        )
        return
    k_lens = cu_seqlens_k.diff().clamp(0, max_seqlen_k)
    attend_capacity(q, cu_seqlens_q, max_seqlen_q, k_lens, max_seqlen_k, kv, rule, sinks, out, lse)


_varlen_attention_op = register(
    "varlen_attention(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, "
    "int max_seqlen_q, int max_seqlen_k, float scale, bool causal, int left, int right, "
    "float softcap, Tensor? sinks, Tensor? k_scale, Tensor? v_scale, bool check_bounds, "
    "Tensor(a!) out, Tensor(b!)? lse) -> ()",
    _varlen_attention,
)
