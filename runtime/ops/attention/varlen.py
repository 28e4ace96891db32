"""Attention to packed keys and values of varying lengths."""

from __future__ import annotations

from itertools import pairwise

import torch

from ..common import checks
from ..common.e4m3 import to_float32
from ..common.torch_library import register
from . import checks as attention_checks
from . import dequantize_kv, prefill_cuda
from .batch_torch import attend_capacity
from .checks import FP8
from .cpu_attention import attend_live
from .kv_view import PackedKV
from .softmax_torch import LogitRule


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
    q_scale: torch.Tensor | None = None,
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

    - q: [total_q, heads_q, dim] bf16, fp16, fp32, or e4m3 with keys and values of e4m3 only.
    - k: [total_k, heads_kv, dim] of q's dtype, int8 or e4m3.
    - v: [total_k, heads_kv, value_dim] of k's dtype; the value dim is any, such as 128 beside keys
      of 192 in DeepSeek-V2 (arXiv:2405.04434).
    - cu_seqlens_q, cu_seqlens_k: [batch + 1] int32, where each sequence begins and ends.
    - max_seqlen_q, max_seqlen_k: capacities, the most rows that one sequence may have.
    - q_scale: fp32 factors of e4m3 queries, and only of them: a scalar or [heads_kv], of the
      heads that share a KV head.
    - k_scale, v_scale: fp32 factors of int8 or e4m3 keys and values, and only of them: a scalar,
      [heads_kv] or [total_k, heads_kv].
    - out: as there; of e4m3 queries it is bf16, or what is given, bf16 or fp16.
    - workspace: of as many bytes as `varlen_attention_workspace` says.
    - check_bounds: check the offsets, which reads them on the host; the CPU always does.

    Returns:
        out [total_q, heads_q, value_dim], or (out, lse) with lse [total_q, heads_q] fp32.

    Raises:
        TypeError, ValueError: naming the argument, before anything is written.
    """
    attention_checks.varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    attention_checks.query_scale(q, q_scale, k.size(1))
    attention_checks.scales(k, k_scale, v_scale)
    value_dim = v.size(2)
    rule = attention_checks.options(
        q, value_dim, scale, causal, window, softcap, sinks, out, workspace
    )
    checks.flag("check_bounds", check_bounds)
    with checks.launch_stream(stream, q.device):
        if out is None:
            dtype = attention_checks.output_dtype(q, out)
            out = torch.zeros((*q.shape[:2], value_dim), dtype=dtype, device=q.device)
        lse = None
        if return_lse:
            lse = torch.full(q.shape[:2], float("-inf"), dtype=torch.float32, device=q.device)
        _varlen_attention_op(
            q,
            k,
            v,
            cu_seqlens_q,
            cu_seqlens_k,
            # In the op to the rows that there are, whose number may be a symbol.
            min(max_seqlen_q, checks.INT32_MAX),
            min(max_seqlen_k, checks.INT32_MAX),
            *rule,
            sinks,
            q_scale,
            k_scale,
            v_scale,
            check_bounds,
            out,
            lse,
            workspace,
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
    q_scale: torch.Tensor | None,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    check_bounds: bool,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    workspace: torch.Tensor | None,
) -> None:
    max_seqlen_q, max_seqlen_k = min(max_seqlen_q, q.size(0)), min(max_seqlen_k, k.size(0))
    rule = LogitRule(scale, causal, left, right, softcap)
    kv = PackedKV(k, v, k_scale, v_scale, cu_seqlens_k)
    on_cpu = q.device.type == "cpu"
    if on_cpu or check_bounds:
        q_bounds = attention_checks.offsets("cu_seqlens_q", cu_seqlens_q, q.size(0), max_seqlen_q)
        k_bounds = attention_checks.offsets("cu_seqlens_k", cu_seqlens_k, k.size(0), max_seqlen_k)
    lengths_of = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    how = (*lengths_of, rule, sinks, out, lse, workspace)
    batch = cu_seqlens_q.size(0) - 1
    if q.dtype is FP8 and not on_cpu:
        assert q_scale is not None
        assert k_scale is not None
        assert v_scale is not None
        scales = prefill_cuda.Fp8Scales(q_scale, k_scale, v_scale)
        kernel = prefill_cuda.fp8_variant(q, k, v, out, scales, batch, max_seqlen_q, left >= 0)
        if kernel is not None:
            prefill_cuda.attend_packed(kernel, q, k, v, *how, scales)
            return
    if q_scale is not None:
        q = _dequantized(q, q_scale, k.size(1))
    if on_cpu:
        lengths = [stop - start for start, stop in pairwise(k_bounds)]
        attend_live(q, q_bounds, lengths, kv, rule, sinks, out, lse)
        return
    if k_scale is not None and v_scale is not None:
        kernel = dequantize_kv.variant(q, k, v, out, batch, max_seqlen_q, tokens=k.size(0))
        if kernel is not None:
            quantized = dequantize_kv.QuantizedKV(k, v, k_scale, v_scale)
            dequantize_kv.attend_packed(kernel, q, quantized, *how)
            return
    kernel = prefill_cuda.packed_variant(q, k, v, out, batch, max_seqlen_q)
    if kernel is not None:
        prefill_cuda.attend_packed(kernel, q, k, v, *how)
        return
    k_lens = cu_seqlens_k.diff().clamp(0, max_seqlen_k)
    attend_capacity(q, cu_seqlens_q, max_seqlen_q, k_lens, max_seqlen_k, kv, rule, sinks, out, lse)


def _dequantized(q: torch.Tensor, scale: torch.Tensor, heads_kv: int) -> torch.Tensor:
    """Return FP8 queries as fp32; `scale` is a scalar or that of each KV head's queries."""
    heads = scale.expand(heads_kv).repeat_interleave(q.size(1) // heads_kv)
    return to_float32(q).mul_(heads.unsqueeze(1))


_varlen_attention_op = register(
    "varlen_attention(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, "
    "SymInt max_seqlen_q, SymInt max_seqlen_k, float scale, bool causal, int left, int right, "
    "float softcap, Tensor? sinks, Tensor? q_scale, Tensor? k_scale, Tensor? v_scale, "
    "bool check_bounds, "
    "Tensor(a!) out, Tensor(b!)? lse, Tensor(c!)? workspace) -> ()",
    _varlen_attention,
)
