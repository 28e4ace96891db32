"""A readable twin of every op: what the op means, one sequence, row or token at a time.

The functions take the arguments of their twins in `ostinato.ops`, less those that only say where
the result goes, and `dtype`, the precision of the arithmetic. Floating-point results are returned
in that precision, not yet rounded to the op's output dtype; both attention ops return (out, lse).
"""

from __future__ import annotations

import math
from itertools import product

import torch

from .sampling.reference import sample as sample

_GROUP = 128
_GRID_MAX = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


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
    keys = _dequantized(k_cache, k_scale, dtype)
    values = _dequantized(v_cache, v_scale, dtype)
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
    keys, values = _dequantized(k, k_scale, dtype), _dequantized(v, v_scale, dtype)
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
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Apply to x [tokens, heads, dim] what `append_kv` does to q and k."""
    x = x.to(dtype)
    if norm_weight is not None:
        x = x / torch.sqrt(x.square().mean(-1, keepdim=True) + norm_eps) * norm_weight.to(dtype)
    if positions is None or cos_sin is None:
        return x
    half = cos_sin.size(1) // 2
    rotated = x.clone()
    for i in range(half):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
        cos = cos_sin[positions.long(), i].to(dtype).unsqueeze(1)
        sin = cos_sin[positions.long(), half + i].to(dtype).unsqueeze(1)
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
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor | None:
    """Write k and v token by token, rounding to the caches' dtype, and return q."""
    keys = norm_and_rotate(
        k, k_norm_weight, norm_eps, positions, cos_sin, interleaved=interleaved, dtype=dtype
    )
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
    if q is None:
        return None
    return norm_and_rotate(
        q, q_norm_weight, norm_eps, positions, cos_sin, interleaved=interleaved, dtype=dtype
    )


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
        channels = w_scale[group].to(dtype).repeat_interleave(8)[: w.size(0)]
        y += x_scale[group].to(dtype).unsqueeze(1) * channels * products
    return y if bias is None else y + bias.to(dtype)


def dynamic_scale(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the scale of each row of x [..., K]: amax / grid maximum, and always positive."""
    amax = x.abs().amax(-1)
    scale = amax / torch.full_like(amax, _GRID_MAX[dtype])
    return scale.clamp(min=torch.finfo(torch.float32).tiny)


def on_grid(x: torch.Tensor, zero_point: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Round x to the numbers of `dtype`, to nearest, ties to even, saturating."""
    if dtype is torch.float8_e4m3fn:
        return x.clamp(-448, 448).to(dtype)
    codes = x.round() if zero_point is None else x.round() + zero_point
    return codes.clamp(-128, 127).to(dtype)


def quantize_per_token(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise each row of x with a scale of its own."""
    x = x.float()
    scale = dynamic_scale(x, dtype)
    return on_grid(x / scale.unsqueeze(1), None, dtype), scale


def quantize_per_group(
    x: torch.Tensor, *, power_of_two: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise each 128 elements of a row to e4m3; return (values, scale [groups, rows])."""
    values, scales = [], []
    for group in x.float().split(_GROUP, dim=1):
        scale = dynamic_scale(group, torch.float8_e4m3fn)
        if power_of_two:
            scale = scale.double().log2().ceil().exp2().float()
        values.append(on_grid(group / scale.unsqueeze(1), None, torch.float8_e4m3fn))
        scales.append(scale)
    return torch.cat([v.view(torch.int8) for v in values], 1).view(values[0].dtype), torch.stack(
        scales
    )


def quantize_asymmetric(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Map each row's range, 0 included, to -128..127; return (values, scale, zero point)."""
    x = x.float()
    low, high = x.amin(1, keepdim=True).clamp(max=0), x.amax(1, keepdim=True).clamp(min=0)
    scale = (high - low) / torch.full_like(high, 255)
    scale = scale.clamp(min=torch.finfo(torch.float32).tiny)
    zero = (-128 - low / scale).round().nan_to_num(-128).clamp(-128, 127)
    return on_grid(x / scale, zero, torch.int8), scale[:, 0], zero[:, 0].int()


def quantize_per_tensor(
    x: torch.Tensor,
    scale: torch.Tensor,
    dtype: torch.dtype,
    *,
    zero_point: torch.Tensor | None = None,
) -> torch.Tensor:
    """Quantise x with one fixed scale."""
    return on_grid(x.float() / scale, zero_point, dtype)


def static_scales(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return `scale` for each row of x; NaN for those that hold a NaN, which int8 cannot code."""
    scales = scale.expand(len(x)).clone()
    if dtype is torch.int8:
        scales[x.isnan().any(1)] = math.nan
    return scales


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    residual: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Return x / sqrt(mean(x²) + eps) · weight, of the rounded sum x + residual if given."""
    if residual is not None:
        x = x + residual
    x = x.to(dtype)
    return x / torch.sqrt(x.square().mean(-1, keepdim=True) + eps) * weight.to(dtype)


def silu_mul(x: torch.Tensor, *, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return silu(gate)·up of x = [gate | up]."""
    gate, up = x.to(dtype).chunk(2, dim=-1)
    return gate * torch.sigmoid(gate) * up


def rms_norm_quantize(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    dtype: torch.dtype,
    *,
    residual: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    zero_point: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalise in fp32, then quantise; return (values, scale)."""
    normalized = rms_norm(x, weight, eps, residual=residual)
    if scale is None:
        return quantize_per_token(normalized, dtype)
    values = quantize_per_tensor(normalized, scale, dtype, zero_point=zero_point)
    return values, static_scales(normalized, scale, dtype)


def silu_mul_quantize(
    x: torch.Tensor,
    dtype: torch.dtype,
    *,
    scale: torch.Tensor | None = None,
    zero_point: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gate in fp32, then quantise; return (values, scale)."""
    gated = silu_mul(x)
    if scale is None:
        return quantize_per_token(gated, dtype)
    values = quantize_per_tensor(gated, scale, dtype, zero_point=zero_point)
    return values, static_scales(gated, scale, dtype)


def rms_norm_quantize_per_group(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    residual: torch.Tensor | None = None,
    power_of_two: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalise in fp32, then quantise by groups; return (values, scale)."""
    normalized = rms_norm(x, weight, eps, residual=residual)
    return quantize_per_group(normalized, power_of_two=power_of_two)


def rms_norm_quantize_asymmetric(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    residual: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Normalise in fp32, then quantise; return (values, scale, zero point)."""
    return quantize_asymmetric(rms_norm(x, weight, eps, residual=residual))


def silu_mul_quantize_asymmetric(
    x: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gate in fp32, then quantise; return (values, scale, zero point)."""
    return quantize_asymmetric(silu_mul(x))


def silu_mul_quantize_per_group(
    x: torch.Tensor, *, power_of_two: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gate in fp32, then quantise by groups; return (values, scale)."""
    return quantize_per_group(silu_mul(x), power_of_two=power_of_two)


def _dequantized(x: torch.Tensor, scale: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    if scale is None:
        return x.to(dtype)
    per_token = scale.ndim == x.ndim - 1
    return x.to(dtype) * (scale if scale.numel() == 1 and not per_token else scale.unsqueeze(-1))
