"""A readable twin of every op: what the op means, one sequence, row or token at a time.

The functions take the arguments of their twins in `ostinato.ops`, less those that only say where
the result goes, and `dtype`, the precision of the arithmetic. Floating-point results are returned
in that precision, not yet rounded to the op's output dtype; both attention ops return (out, lse).
"""

from __future__ import annotations

import math
from itertools import product

import torch

from .collective.reference import (
    all_gather,
    all_reduce,
    all_reduce_norm,
    all_reduce_norm_quantize,
    all_reduce_norm_quantize_per_group,
)
from .linear.reference_rows import (
    activation,
    activation_quantize,
    activation_quantize_asymmetric,
    activation_quantize_per_group,
    dynamic_scale,
    layer_norm,
    layer_norm_quantize,
    layer_norm_quantize_asymmetric,
    layer_norm_quantize_per_group,
    on_grid,
    quantize,
    quantize_asymmetric,
    quantize_per_group,
    quantize_per_tensor,
    quantize_per_token,
    rms_norm,
    rms_norm_quantize,
    rms_norm_quantize_asymmetric,
    rms_norm_quantize_per_group,
    silu_mul,
    silu_mul_quantize,
    silu_mul_quantize_per_group,
    static_scales,
)
from .moe.reference import moe_combine, moe_linear, moe_route
from .sampling.reference import sample, softcap
from .sampling.reference_logits import process_logits, token_logprobs

__all__ = [
    "activation",
    "activation_quantize",
    "activation_quantize_asymmetric",
    "activation_quantize_per_group",
    "all_gather",
    "all_reduce",
    "all_reduce_norm",
    "all_reduce_norm_quantize",
    "all_reduce_norm_quantize_per_group",
    "append_kv",
    "attention",
    "dequantized",
    "dynamic_scale",
    "embed",
    "fp8_block_linear",
    "layer_norm",
    "layer_norm_quantize",
    "layer_norm_quantize_asymmetric",
    "layer_norm_quantize_per_group",
    "linear",
    "merge_states",
    "moe_combine",
    "moe_linear",
    "moe_route",
    "norm_and_rotate",
    "on_grid",
    "paged_attention",
    "process_logits",
    "quantize",
    "quantize_asymmetric",
    "quantize_per_group",
    "quantize_per_tensor",
    "quantize_per_token",
    "rms_norm",
    "rms_norm_quantize",
    "rms_norm_quantize_asymmetric",
    "rms_norm_quantize_per_group",
    "sample",
    "silu_mul",
    "silu_mul_quantize",
    "silu_mul_quantize_per_group",
    "softcap",
    "static_scales",
    "token_logprobs",
    "varlen_attention",
    "w8a8_linear",
]

_GROUP = 128


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float | None = None,
    causal: bool = True,
    window: tuple[int, int] | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend from q [Lq, heads_q, dim], the last Lq tokens, to k [Lk, heads_kv, dim].

    v is [Lk, heads_kv, value_dim], and so is the last dimension of the output.
    """
    q_len, heads_q, dim = q.shape
    k_len, heads_kv, _ = k.shape
    group = heads_q // heads_kv
    k = k.to(dtype).repeat_interleave(group, dim=1)
    v = v.to(dtype).repeat_interleave(group, dim=1)
    left, right = (-1, -1) if window is None else window
    out = torch.zeros(q_len, heads_q, v.size(2), dtype=dtype, device=q.device)
    lse = torch.full((q_len, heads_q), -math.inf, dtype=dtype, device=q.device)
    for i in range(q_len):
        position = k_len - q_len + i
        first = max(0, position - left) if left >= 0 else 0
        stop = position + 1 if causal else k_len
        if right >= 0:
            stop = min(stop, position + right + 1)
        if first >= stop:
            continue
        logits = torch.einsum("hd,jhd->hj", q[i].to(dtype), k[first:stop])
        logits = logits * (1 / math.sqrt(dim) if scale is None else scale)
        if softcap > 0:
            logits = softcap * torch.tanh(logits / softcap)
        denominator = logits
        if sinks is not None:
            denominator = torch.cat([logits, sinks.to(dtype).unsqueeze(1)], dim=1)
        lse[i] = denominator.logsumexp(dim=1)
        weights = torch.exp(logits - lse[i].unsqueeze(1))
        out[i] = torch.einsum("hj,jhd->hd", weights, v[first:stop])
    return out, lse


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    cu_seqlens_q: torch.Tensor | None = None,
    max_seqlen_q: int = 1,
    scale: float | None = None,
    causal: bool = True,
    window: tuple[int, int] | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gather each sequence's pages and attend to them."""
    page_size = k_cache.size(1)
    capacity = page_table.size(1) * page_size
    keys = dequantized(k_cache, k_scale, dtype)
    values = dequantized(v_cache, v_scale, dtype)
    out = torch.zeros(*q.shape[:2], v_cache.size(3), dtype=dtype, device=q.device)
    lse = torch.full(q.shape[:2], -math.inf, dtype=dtype, device=q.device)
    for b, length in enumerate(seq_lens.tolist()):
        length = min(max(length, 0), capacity)
        pages = page_table[b, : math.ceil(length / page_size)].long()
        # Those that no query of a window sees may be any number.
        pages = pages.clamp(0, k_cache.size(0) - 1)
        if cu_seqlens_q is None:
            rows = slice(b * max_seqlen_q, (b + 1) * max_seqlen_q)
        else:
            rows = slice(int(cu_seqlens_q[b]), int(cu_seqlens_q[b + 1]))
        out[rows], lse[rows] = attention(
            q[rows],
            keys[pages].flatten(0, 1)[:length],
            values[pages].flatten(0, 1)[:length],
            scale=scale,
            causal=causal,
            window=window,
            softcap=softcap,
            sinks=sinks,
            dtype=dtype,
        )
    return out, lse


def varlen_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    *,
    scale: float | None = None,
    causal: bool = True,
    window: tuple[int, int] | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    q_scale: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cut the packed sequences out and attend to each."""
    if q_scale is not None:
        heads = q_scale.to(dtype).expand(k.size(1)).repeat_interleave(q.size(1) // k.size(1))
        q = q.to(dtype) * heads.unsqueeze(1)
    keys, values = dequantized(k, k_scale, dtype), dequantized(v, v_scale, dtype)
    out = torch.zeros(*q.shape[:2], v.size(2), dtype=dtype, device=q.device)
    lse = torch.full(q.shape[:2], -math.inf, dtype=dtype, device=q.device)
    for b in range(cu_seqlens_q.numel() - 1):
        rows = slice(int(cu_seqlens_q[b]), int(cu_seqlens_q[b + 1]))
        live = slice(int(cu_seqlens_k[b]), int(cu_seqlens_k[b + 1]))
        out[rows], lse[rows] = attention(
            q[rows],
            keys[live],
            values[live],
            scale=scale,
            causal=causal,
            window=window,
            softcap=softcap,
            sinks=sinks,
            dtype=dtype,
        )
    return out, lse


def embed(
    tokens: torch.Tensor,
    table: torch.Tensor,
    *,
    seen: torch.Tensor | None = None,
    seen_rows: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Copy the table's row of each token, and mark the token in its row of `seen`."""
    out = torch.empty(len(tokens), table.size(1), dtype=dtype, device=table.device)
    for at, token in enumerate(tokens.tolist()):
        out[at] = table[token]
        if seen is not None and seen_rows is not None:
            seen[int(seen_rows[at]), token] = True
    return out


def merge_states(
    o_a: torch.Tensor,
    lse_a: torch.Tensor,
    o_b: torch.Tensor,
    lse_b: torch.Tensor,
    *,
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weigh two outputs of each head by their softmax denominators; returns (out, lse)."""
    out = torch.zeros(o_a.shape, dtype=dtype, device=o_a.device)
    lse = torch.full(o_a.shape[:2], -math.inf, dtype=dtype, device=o_a.device)
    for at in product(*map(range, o_a.shape[:2])):
        states = [(o[at].to(dtype), of[at].to(dtype)) for o, of in ((o_a, lse_a), (o_b, lse_b))]
        states = [(o, of) for o, of in states if of > -math.inf]
        if states:
            lse[at] = torch.stack([of for _, of in states]).logsumexp(dim=0)
            out[at] = sum(o * torch.exp(of - lse[at]) for o, of in states)
    return out, lse


def norm_and_rotate(
    x: torch.Tensor,
    norm_weight: torch.Tensor | None,
    norm_eps: float,
    positions: torch.Tensor | None,
    cos_sin: torch.Tensor | None,
    *,
    interleaved: bool = False,
    norm_after_rotation: bool = False,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Apply to x [tokens, heads, dim] what `append_kv` does to q and k."""
    x = x.to(dtype)
    if norm_after_rotation:
        x = _rotated(x, positions, cos_sin, interleaved)
    if norm_weight is not None:
        x = x / torch.sqrt(x.square().mean(-1, keepdim=True) + norm_eps) * norm_weight.to(dtype)
    return x if norm_after_rotation else _rotated(x, positions, cos_sin, interleaved)


def _rotated(
    x: torch.Tensor,
    positions: torch.Tensor | None,
    cos_sin: torch.Tensor | None,
    interleaved: bool,
) -> torch.Tensor:
    if positions is None or cos_sin is None:
        return x
    half = cos_sin.size(1) // 2
    rotated = x.clone()
    for i in range(half):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
        cos = cos_sin[positions.long(), i].to(x.dtype).unsqueeze(1)
        sin = cos_sin[positions.long(), half + i].to(x.dtype).unsqueeze(1)
        rotated[..., a] = x[..., a] * cos - x[..., b] * sin
        rotated[..., b] = x[..., b] * cos + x[..., a] * sin
    return rotated


def append_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    positions: torch.Tensor | None = None,
    cos_sin: torch.Tensor | None = None,
    q: torch.Tensor | None = None,
    interleaved: bool = False,
    q_norm_weight: torch.Tensor | None = None,
    k_norm_weight: torch.Tensor | None = None,
    norm_eps: float = 1e-6,
    norm_after_rotation: bool = False,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor | None:
    """Write k and v token by token, rounding to the caches' dtype, and return q."""

    def finished(x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        return norm_and_rotate(
            x,
            weight,
            norm_eps,
            positions,
            cos_sin,
            interleaved=interleaved,
            norm_after_rotation=norm_after_rotation,
            dtype=dtype,
        )

    keys = finished(k, k_norm_weight)
    for x, cache, scale in ((keys, k_cache, k_scale), (v.to(dtype), v_cache, v_scale)):
        for token, slot in enumerate(slot_mapping.tolist()):
            if slot < 0:
                continue
            page, offset = divmod(slot, cache.size(1))
            if scale is None:
                cache[page, offset] = x[token].to(cache.dtype)
                continue
            if scale.ndim == 3:
                scale[page, offset] = dynamic_scale(x[token], cache.dtype)
                divisor = scale[page, offset]
            else:
                divisor = scale.expand(cache.size(2))
            cache[page, offset] = on_grid(x[token] / divisor.unsqueeze(-1), None, cache.dtype)
    return None if q is None else finished(q, q_norm_weight)


def linear(
    x: torch.Tensor,
    w: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Return x·wᵀ + bias."""
    y = x.to(dtype) @ w.to(dtype).t()
    return y if bias is None else y + bias.to(dtype)


def w8a8_linear(
    x: torch.Tensor,
    w: torch.Tensor,
    x_scale: torch.Tensor,
    w_scale: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    x_zero_point: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Return x_scale · (w_scale · acc) + bias; for int8 acc is exact."""
    if x.dtype is torch.int8:
        zero = 0 if x_zero_point is None else x_zero_point.reshape(-1, 1)
        # fp64 holds every sum of fewer than 2^37 products of two int8 numbers.
        acc = (x.double() - zero) @ w.double().t()
    else:
        acc = x.to(dtype) @ w.to(dtype).t()
    y = x_scale.reshape(-1, 1).to(dtype) * (w_scale.to(dtype) * acc.to(dtype))
    return y if bias is None else y + bias.to(dtype)


def fp8_block_linear(
    x: torch.Tensor,
    w: torch.Tensor,
    x_scale: torch.Tensor,
    w_scale: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Add up products of 128 of K, each scaled, then the bias."""
    y = torch.zeros(x.size(0), w.size(0), dtype=dtype, device=x.device)
    for group in range(x_scale.size(0)):
        of_k = slice(_GROUP * group, _GROUP * (group + 1))
        products = x[:, of_k].to(dtype) @ w[:, of_k].to(dtype).t()
        shared = 8 if w_scale.size(1) == -(-w.size(0) // 8) else 128
        channels = w_scale[group].to(dtype).repeat_interleave(shared)[: w.size(0)]
        y += x_scale[group].to(dtype).unsqueeze(1) * channels * products
    return y if bias is None else y + bias.to(dtype)


def dequantized(x: torch.Tensor, scale: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Multiply 8-bit keys or values [..., heads, dim] by their scale; others have none."""
    if scale is None:
        return x.to(dtype)
    per_token = scale.ndim == x.ndim - 1
    return x.to(dtype) * (scale if scale.numel() == 1 and not per_token else scale.unsqueeze(-1))
