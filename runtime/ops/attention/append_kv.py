"""Writing new keys and values into a paged cache, with q/k norm, RoPE and quantisation."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..common import checks
from ..common.batch_invariant_rows import mean_square
from ..common.device import has_kernel
from ..common.e4m3 import as_bytes
from ..common.torch_library import register
from ..linear.quantize import dynamic_scale, encode
from . import checks as attention_checks
from .append_kv_cuda import AppendKV, append_heads

_MOST_HEADS = 4 * 65535  # a block of the launch has at least 4, and a grid so many blocks a token


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
    q_out: torch.Tensor | None = None,
    interleaved: bool = False,
    q_norm_weight: torch.Tensor | None = None,
    k_norm_weight: torch.Tensor | None = None,
    norm_eps: float = 1e-6,
    norm_after_rotation: bool = False,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    k_scale_out: torch.Tensor | None = None,
    v_scale_out: torch.Tensor | None = None,
    check_bounds: bool = False,
    stream: checks.Stream = None,
) -> torch.Tensor | None:
    """Normalise and rotate q and k, write k and v into the cache's slots, return q.

    Each head of q and k is divided by its root mean square if its norm weight is given, then
    rotated by its token's position if `cos_sin` is given (RoPE: Su et al., "RoFormer", 2021), or
    the other way round with `norm_after_rotation`; all in fp32 and rounded once. Slot s is
    [s // page_size, s % page_size]; a token of slot -1 is not written, but its q is returned like
    any other's. No other slot may occur twice. On a GPU, from sm_80 on, all of it is one launch
    (docs/notebooks/append.md).

    Args:
        k: [tokens, heads_kv, dim] bf16, fp16 or fp32.
        v: like k.
        k_cache: [pages, page_size, heads_kv, dim] of k's dtype, int8 or e4m3; written.
        v_cache: like k_cache; written.
        slot_mapping: [tokens] int64, -1 for tokens that are not written.
        positions: [tokens] int32, rows of cos_sin; goes with it.
        cos_sin: [max_positions, rotary_dim] fp32, rotary_dim even and at most dim: the cosines of
            the rotary_dim / 2 angles, then their sines. Elements from rotary_dim on stay.
        q: [tokens, heads_q, dim] of k's dtype.
        q_out: like q, and may be q itself; allocated when None.
        interleaved: rotate elements (2i, 2i + 1), not (i, i + rotary_dim / 2).
        q_norm_weight: [dim] of k's dtype or fp32.
        k_norm_weight: likewise.
        norm_eps: added to the mean of squares, at least 0.
        norm_after_rotation: rotate first, then normalise.
        k_scale: fp32, for an int8 or e4m3 cache and only then. A scalar or [heads_kv] divides k;
            into [pages, page_size, heads_kv] with any strides the scale of each token and head,
            computed as in `quantize_per_token`, is written.
        v_scale: likewise for v.
        k_scale_out: [pages, page_size, heads_kv] fp32, written at the tokens' slots: k_scale, which
            is fixed then, and for an int8 head that holds a NaN, NaN. int8 has no code for NaN;
            as the `k_scale` of `paged_attention` this shows it.
        v_scale_out: likewise for v.
        check_bounds: check slots and positions, which the host must see for it. The CPU always
            does; on CUDA a wrong one is undefined without it.
        stream: see `ostinato.ops`.

    Returns:
        q_out, or None if q is None.

    Raises:
        TypeError, ValueError: naming the argument, before anything is written.
    """
    checks.tensor("k", k, checks.FLOAT_DTYPES, ("tokens", "heads_kv", "dim"))
    device, dtype = k.device, k.dtype
    tokens, _, dim = k.shape
    checks.int32_sizes("k", k.shape, "tokens", "heads_kv", "dim")
    attention_checks.caches(k_cache, v_cache, dtype, dim, device, value_dim=dim)
    checks.int32_sizes("k_cache", k_cache.shape[1:2], "page_size")
    checks.tensor("k", k, (dtype,), (tokens, k_cache.size(2), dim))
    checks.tensor("v", v, (dtype,), k.shape, device)
    checks.tensor("slot_mapping", slot_mapping, (torch.int64,), (tokens,), device)
    attention_checks.scales(k_cache, k_scale, v_scale)
    checks.writable("k_cache", k_cache)
    checks.writable("v_cache", v_cache)
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if scale is not None and scale.ndim == 3:
            checks.writable(name, scale)
    _check_scale_out("k_scale_out", k_scale_out, k_scale, k_cache)
    _check_scale_out("v_scale_out", v_scale_out, v_scale, k_cache)
    _check_rotary(positions, cos_sin, tokens, dim, device)
    norms = {"k_norm_weight": k_norm_weight, "q_norm_weight": q_norm_weight}
    for name, weight in norms.items():
        if weight is not None:
            checks.tensor(name, weight, (dtype, torch.float32), (dim,), device)
    checks.number("norm_eps", norm_eps, least=0.0)
    checks.flag("norm_after_rotation", norm_after_rotation)
    checks.flag("interleaved", interleaved)
    checks.flag("check_bounds", check_bounds)
    if q is not None:
        checks.tensor("q", q, (dtype,), (tokens, "heads_q", dim), device)
        checks.int32_sizes("q", q.shape[1:2], "heads_q")
        if q_out is not None:
            checks.output("q_out", q_out, (dtype,), q.shape, device)
    heads = 2 * k.size(1) + (0 if q is None else q.size(1))
    if heads > _MOST_HEADS:
        raise ValueError(f"k: got {heads} heads of k, v and q, expected at most {_MOST_HEADS}")
    for name, given in (("q_out", q_out), ("q_norm_weight", q_norm_weight)):
        if q is None and given is not None:
            raise ValueError(f"{name}: got a tensor, expected None without q")
    with checks.launch_stream(stream, device):
        if q is not None and q_out is None:
            q_out = torch.empty(q.shape, dtype=dtype, device=device)
        _append_kv_op(
            k,
            v,
            k_cache,
            v_cache,
            slot_mapping,
            positions,
            cos_sin,
            q,
            q_out,
            interleaved,
            q_norm_weight,
            k_norm_weight,
            norm_eps,
            norm_after_rotation,
            k_scale,
            v_scale,
            k_scale_out,
            v_scale_out,
            check_bounds,
        )
    return q_out


def _check_scale_out(
    name: str, written: torch.Tensor | None, scale: torch.Tensor | None, cache: torch.Tensor
) -> None:
    if written is None:
        return
    if scale is None or scale.ndim == 3:
        kind = "without a scale" if scale is None else "beside scales per token"
        raise ValueError(f"{name}: got a tensor, expected None {kind}")
    checks.tensor(name, written, (torch.float32,), cache.shape[:-1], cache.device)
    checks.writable(name, written)


def _check_rotary(
    positions: torch.Tensor | None,
    cos_sin: torch.Tensor | None,
    tokens: int,
    dim: int,
    device: torch.device,
) -> None:
    checks.both_or_neither("positions", positions, "cos_sin", cos_sin)
    if positions is None or cos_sin is None:
        return
    checks.tensor("positions", positions, (torch.int32,), (tokens,), device)
    checks.tensor("cos_sin", cos_sin, (torch.float32,), ("max_positions", "rotary_dim"), device)
    checks.not_empty("cos_sin", cos_sin, "max_positions", "rotary_dim")
    rotary_dim = cos_sin.size(1)
    if rotary_dim % 2 or rotary_dim > dim:
        raise ValueError(
            f"cos_sin: got rotary_dim = {rotary_dim}, expected an even number up to dim = {dim}"
        )


def _check_bounds(
    slot_mapping: torch.Tensor,
    k_cache: torch.Tensor,
    positions: torch.Tensor | None,
    cos_sin: torch.Tensor | None,
) -> None:
    slots = slot_mapping.tolist()
    last = k_cache.size(0) * k_cache.size(1) - 1
    checks.token_values("slot_mapping", slots, least=-1, most=last)
    written = [slot for slot in slots if slot >= 0]
    if len(set(written)) < len(written):
        repeated = next(slot for slot in written if written.count(slot) > 1)
        raise ValueError(
            f"slot_mapping: got {repeated} for {written.count(repeated)} tokens, "
            "expected no slot twice"
        )
    if positions is not None and cos_sin is not None:
        last = cos_sin.size(0) - 1
        checks.token_values("positions", positions.tolist(), least=0, most=last)


def _append_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    positions: torch.Tensor | None,
    cos_sin: torch.Tensor | None,
    q: torch.Tensor | None,
    q_out: torch.Tensor | None,
    interleaved: bool,
    q_norm_weight: torch.Tensor | None,
    k_norm_weight: torch.Tensor | None,
    norm_eps: float,
    norm_after_rotation: bool,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    k_scale_out: torch.Tensor | None,
    v_scale_out: torch.Tensor | None,
    check_bounds: bool,
) -> None:
    if k.size(0) == 0:
        return
    if check_bounds or k.device.type == "cpu":
        _check_bounds(slot_mapping, k_cache, positions, cos_sin)
    if has_kernel(AppendKV, k):
        append_heads(
            k,
            v,
            k_cache,
            v_cache,
            slot_mapping,
            positions,
            cos_sin,
            q,
            q_out,
            interleaved,
            q_norm_weight,
            k_norm_weight,
            norm_eps,
            norm_after_rotation,
            k_scale,
            v_scale,
            k_scale_out,
            v_scale_out,
        )
        return
    heads, weights = [k.float()], [k_norm_weight]
    if q is not None:
        heads, weights = [q.float(), *heads], [q_norm_weight, *weights]
    if not norm_after_rotation:
        heads = _normalized(heads, weights, norm_eps)
    if positions is not None and cos_sin is not None:
        angles = cos_sin.index_select(0, positions).unsqueeze(1)
        counts = [x.size(1) for x in heads]
        heads = list(_rotated(torch.cat(heads, dim=1), angles, interleaved).split(counts, dim=1))
    if norm_after_rotation:
        heads = _normalized(heads, weights, norm_eps)
    if q_out is not None:
        q_out.copy_(heads[0])
    places = _Places(slot_mapping, k_cache.size(1))
    for x, cache, scale, scale_out in (
        (heads[-1], k_cache, k_scale, k_scale_out),
        (v.float(), v_cache, v_scale, v_scale_out),
    ):
        if scale is None:
            places.write(cache, x.to(cache.dtype))
            continue
        if scale.ndim == 3:
            token_scale = dynamic_scale(x, cache.dtype)
            places.write(scale, token_scale)
            scale = token_scale
        if scale_out is not None:
            places.write(scale_out, _shown_scales(x, scale, cache.dtype))
        divisor = scale.unsqueeze(-1) if scale.ndim else scale
        places.write(cache, encode(x, divisor, cache.dtype))


def _shown_scales(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a fixed scale for each head of x [tokens, heads, dim], NaN where int8 hides one."""
    scales = scale.expand(x.shape[:2])
    return scales.masked_fill(x.isnan().any(-1), torch.nan) if dtype is torch.int8 else scales


def _normalized(
    heads: Sequence[torch.Tensor], weights: Sequence[torch.Tensor | None], eps: float
) -> list[torch.Tensor]:
    """Return heads [tokens, heads, dim] divided by their roots of mean squares, times weights."""

    def normalized(x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        if weight is None:
            return x
        squares = mean_square(x.reshape(-1, x.size(2))).view(x.size(0), x.size(1), 1)
        return x / (squares + eps).sqrt_() * weight

    return [normalized(x, weight) for x, weight in zip(heads, weights, strict=True)]


def _rotated(x: torch.Tensor, angles: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Rotate x [tokens, heads, dim] by angles [tokens, 1, rotary_dim], cosines then sines."""
    rotary_dim = angles.size(-1)
    cos, sin = angles.chunk(2, dim=-1)
    if interleaved:
        first, second = x[..., 0:rotary_dim:2], x[..., 1:rotary_dim:2]
    else:
        first, second = x[..., :rotary_dim].chunk(2, dim=-1)
    pair = (first * cos - second * sin, second * cos + first * sin)
    rotated = torch.stack(pair, dim=-1).flatten(-2) if interleaved else torch.cat(pair, dim=-1)
    if rotary_dim == x.size(-1):
        return rotated
    return torch.cat([rotated, x[..., rotary_dim:]], dim=-1)


class _Places:
    """Where each token goes in a cache [pages, page_size, ...]."""

    def __init__(self, slots: torch.Tensor, page_size: int) -> None:
        written = slots >= 0
        self._any_written: torch.Tensor | None = None
        if slots.device.type == "cpu":
            self._token = written.nonzero().squeeze(1)
        else:
            # The host does not know how many tokens have a slot, so all are written: those without
            # one repeat the write of the first that has one or, if none has, write to slot 0 what
            # is there already.
            self._any_written = written.any()
            every = torch.arange(slots.size(0), device=slots.device)
            self._token = torch.where(written, every, written.int().argmax())
        slot = slots.index_select(0, self._token).clamp_min_(0)
        self._index = (slot // page_size, slot % page_size)

    def write(self, cache: torch.Tensor, values: torch.Tensor) -> None:
        """Write values [tokens, ...], of cache's dtype, to their slots."""
        cache, values = as_bytes(cache), as_bytes(values).index_select(0, self._token)
        if self._any_written is not None:
            values = torch.where(self._any_written, values, cache[self._index])
        cache.index_put_(self._index, values)


_append_kv_op = register(
    "append_kv(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slot_mapping, "
    "Tensor? positions, Tensor? cos_sin, Tensor? q, Tensor(c!)? q_out, bool interleaved, "
    "Tensor? q_norm_weight, Tensor? k_norm_weight, float norm_eps, bool norm_after_rotation, "
    "Tensor(d!)? k_scale, Tensor(e!)? v_scale, Tensor(f!)? k_scale_out, Tensor(g!)? v_scale_out, "
    "bool check_bounds) -> ()",
    _append_kv,
)
