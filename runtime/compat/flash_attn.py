"""FlashAttention's functions for inference: `from ostinato.compat.flash_attn import ...`.

Arguments come in the order of flash-attn 2.8; those that only FlashAttention-3 has
(`flash_attn_interface`) are keywords here, so that callers of either change one import. Results are
theirs, but for four things: there is no backward pass, queries that see no key have an LSE of
-inf, what is returned as LSE may be a view, and with it come three results, as from flash-attn 2,
where FlashAttention-3 returns two.

- `num_splits`, `pack_gqa`, `sm_margin`, `scheduler_metadata` and `deterministic` are about speed,
  or about the backward pass: they are taken and do nothing. The bits of a decode step of one query
  a sequence depend neither on the batch nor on the width of the block table.
- What would change the result and is not built raises a ValueError that names the argument:
  dropout, ALiBi slopes, `qv`, descales (8-bit inputs), `attention_chunk`, `cache_leftpad`,
  `seqused_q`, `cu_seqlens_k_new`, `rotary_seqlens`, and k and v to be written to a cache whose
  values have another dim than its keys.

All of it can be captured in a graph, with lengths and tables that change between replays, where
`cache_seqlens` is a tensor. How much runs on our kernels, `docs/notebooks/prefill.md` and
`docs/notebooks/decode.md` say.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .. import ops
from ..ops.attention import checks as attention_checks
from ..ops.common import checks
from .flash_attn_cache import Cache

__all__ = ["flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"]

Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
ResultOfFlashAttention2 = torch.Tensor | tuple[torch.Tensor, torch.Tensor, None]
_INT32 = (torch.int32,)


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] | None = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    qv: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    attention_chunk: int = 0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> ResultOfFlashAttention2:
    """Attend within sequences of one length.

    Args:
        q: [batch, seqlen_q, heads_q, dim] bf16, fp16 or fp32.
        k: [batch, seqlen_k, heads_kv, dim] of q's dtype; heads_kv divides heads_q.
        v: [batch, seqlen_k, heads_kv, value_dim], else like k; the value dim is any.
        dropout_p: 0.
        softmax_scale: factor of q·k; None is 1/sqrt(dim).
        causal: hide the keys after a query's position, the last query's being the last key's.
        window_size: (left, right) keys beside a query's position that it sees; -1, or None for
            both, for no limit.
        softcap: s > 0 turns each logit into s·tanh(logit / s).
        alibi_slopes: None.
        deterministic: taken, without effect: results always are.
        return_attn_probs: return the LSE too; there are no probabilities without dropout.
        qv: None.
        q_descale: None.
        k_descale: None.
        v_descale: None.
        attention_chunk: 0.
        num_splits: taken, without effect.
        pack_gqa: likewise.
        sm_margin: likewise.

    Returns:
        out [batch, seqlen_q, heads_q, value_dim], or (out, lse [batch, heads_q, seqlen_q], None).

    Raises:
        TypeError, ValueError: naming the argument.
    """
    _refuse_others(dropout_p, alibi_slopes, qv, q_descale, k_descale, v_descale, attention_chunk)
    _refuse_gradients(q, k, v)
    _check_batched("q", q)
    _check_batched("k", k, q.size(0))
    _check_batched("v", v, q.size(0))
    batch, seqlen_q, seqlen_k = q.size(0), q.size(1), k.size(1)
    out, lse = ops.varlen_attention(
        _dense("q", q).flatten(0, 1),
        _dense("k", k).flatten(0, 1),
        _dense("v", v).flatten(0, 1),
        _offsets(batch, seqlen_q, q.device),
        _offsets(batch, seqlen_k, q.device),
        max(seqlen_q, 1),
        max(seqlen_k, 1),
        scale=_scale(softmax_scale),
        causal=causal,
        window=_window(window_size),
        softcap=softcap,
        return_lse=True,
    )
    out = out.view(*q.shape[:3], v.size(3))
    return (out, _by_sequence(lse, batch, seqlen_q), None) if return_attn_probs else out


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] | None = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
    *,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    qv: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    attention_chunk: int = 0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> ResultOfFlashAttention2:
    """Attend within sequences of varying lengths.

    Arguments are those of `flash_attn_func`, but for these:

    - q: [total_q, heads_q, dim]; k, v: [total_k, heads_kv, dim or value_dim], packed, or with
      `block_table` pages [blocks, block_size, heads_kv, dim or value_dim] of any size.
    - cu_seqlens_q, cu_seqlens_k: [batch + 1] int32, where each sequence begins and ends. With
      `block_table` the differences of the second count, and it may be None if `seqused_k` is given.
    - max_seqlen_q, max_seqlen_k: the most rows that one sequence may have.
    - block_table: [batch, blocks of a sequence] int32.
    - seqused_k: [batch] int32, the keys of each sequence; with `block_table` only.
    - seqused_q: None.

    Returns:
        out [total_q, heads_q, value_dim], or (out, lse [heads_q, total_q], None).
    """
    _refuse_others(dropout_p, alibi_slopes, qv, q_descale, k_descale, v_descale, attention_chunk)
    _refuse("seqused_q", seqused_q)
    _refuse_gradients(q, k, v)
    q, k, v = _dense("q", q), _dense("k", k), _dense("v", v)
    scale, window = _scale(softmax_scale), _window(window_size)
    if block_table is None:
        _refuse("seqused_k", seqused_k, "without block_table")
        if cu_seqlens_k is None:
            raise ValueError("cu_seqlens_k: got None, expected a tensor without block_table")
        out, lse = ops.varlen_attention(
            *(q, k, v, cu_seqlens_q, cu_seqlens_k),
            _most("max_seqlen_q", max_seqlen_q),
            _most("max_seqlen_k", max_seqlen_k),
            scale=scale,
            causal=causal,
            window=window,
            softcap=softcap,
            return_lse=True,
        )
    else:
        out, lse = ops.paged_attention(
            *(q, k, v, block_table),
            _lengths(cu_seqlens_k, seqused_k, block_table),
            cu_seqlens_q=cu_seqlens_q,
            max_seqlen_q=_most("max_seqlen_q", max_seqlen_q),
            scale=scale,
            causal=causal,
            window=window,
            softcap=softcap,
            return_lse=True,
        )
    return (out, lse.t(), None) if return_attn_probs else out


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: int | torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] | None = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: torch.Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    qv: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k_new: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    attention_chunk: int = 0,
    scheduler_metadata: torch.Tensor | None = None,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> Result:
    """Attend to a cache, after writing k and v into it if they are given.

    Arguments are those of `flash_attn_func`, but for these:

    - q: [batch, seqlen_q, heads_q, dim], or [total_q, heads_q, dim] with `cu_seqlens_q`.
    - k_cache, v_cache: [rows, capacity, heads_kv, dim], or with `block_table` pages [blocks,
      block_size, heads_kv, dim] of any size; written if there are k and v. Without these v_cache
      may have another dim.
    - k, v: [batch, seqlen_new, heads_kv, dim], written after the `cache_seqlens` tokens of each
      sequence. Of tokens for which a cache has no room, or no page from 0 to blocks - 1, nothing is
      written, and their rows of the result mean nothing; on a CPU such a page is an error.
    - rotary_cos, rotary_sin: [positions, rotary_dim / 2], at least as many positions as a sequence
      has room for; rotate k and q, with k and v only. A query's position is that of the new token
      beside it if `causal` or with a window, otherwise that of the first new one.
    - cache_seqlens: how many tokens each sequence has before k and v are written, an int or
      [batch] int32; None, without k, for as many as there is room for.
    - cache_batch_idx: [batch] int32, the row of the cache of each sequence; not with `block_table`.
    - block_table, page_table: [batch, blocks of a sequence] int32; two names of one argument.
    - rotary_interleaved: rotate elements (2i, 2i + 1), otherwise (i, i + rotary_dim / 2).
    - cu_seqlens_q, max_seqlen_q: as in `flash_attn_varlen_func`; without k and v only.
    - return_softmax_lse: return the LSE too.
    - cache_leftpad, cu_seqlens_k_new, rotary_seqlens: None.

    Returns:
        out, of q's shape but for the dim, which is v_cache's, or (out, lse): lse is
        [batch, heads_q, seqlen_q], or [heads_q, total_q] with `cu_seqlens_q`.
    """
    _refuse_others(0.0, alibi_slopes, qv, q_descale, k_descale, v_descale, attention_chunk)
    _refuse("cache_leftpad", cache_leftpad)
    _refuse("cu_seqlens_k_new", cu_seqlens_k_new)
    _refuse("rotary_seqlens", rotary_seqlens)
    _refuse_gradients(q, k_cache, v_cache, k, v)
    if block_table is None:
        block_table = page_table
    elif page_table is not None:
        raise ValueError("page_table: got a tensor with block_table, expected one of the two")
    scale, window = _scale(softmax_scale), _window(window_size)
    if cu_seqlens_q is None:
        _check_batched("q", q)
        batch, seqlen_q = q.size(0), q.size(1)
        rows = _dense("q", q).flatten(0, 1)
    else:
        _refuse("k", k, "with cu_seqlens_q")
        if max_seqlen_q is None:
            raise ValueError("max_seqlen_q: got None, expected an int with cu_seqlens_q")
        rows = _dense("q", q)
        checks.tensor("cu_seqlens_q", cu_seqlens_q, _INT32, ("batch + 1",), q.device)
        batch, seqlen_q = cu_seqlens_q.size(0) - 1, _most("max_seqlen_q", max_seqlen_q)
    cache = Cache.of(k_cache, v_cache, block_table, cache_batch_idx, cache_seqlens, batch)
    checks.both_or_neither("k", k, "v", v)
    checks.both_or_neither("rotary_cos", rotary_cos, "rotary_sin", rotary_sin)
    lengths, table = cache.lengths, cache.table
    if k is not None and v is not None:
        if cache_seqlens is None:
            raise ValueError("cache_seqlens: got None with k, expected where k is to be written")
        _check_batched("k", k, batch)
        _check_batched("v", v, batch)
        checks.flag("rotary_interleaved", rotary_interleaved)
        if rotary_cos is not None and rotary_sin is not None:
            cache.check_angles(rotary_cos, rotary_sin)
        # All of it before the cache is written.
        if seqlen_q > 0:
            attention_checks.paged(
                rows, k_cache, v_cache, cache.table, lengths, cu_seqlens_q, seqlen_q
            )
        attention_checks.options(
            rows, v_cache.size(-1), scale, causal, window, softcap, None, None, None
        )
        local = causal or window is not None
        cache.check_pages(k.size(1), whole=window is None or window[0] < 0)
        rows = cache.append(
            rows, _dense("k", k), _dense("v", v), rotary_cos, rotary_sin, rotary_interleaved, local
        )
        lengths = lengths + k.size(1)
        if local and k.size(1) > 1:
            table = cache.table_beyond(k.size(1))
    else:
        _refuse("rotary_cos", rotary_cos, "without k")
    if seqlen_q == 0:
        out = rows.new_empty(*rows.shape[:2], v_cache.size(-1))
        lse = rows.new_empty(rows.shape[:2], dtype=torch.float32)
    else:
        out, lse = ops.paged_attention(
            *(rows, k_cache, v_cache, table, lengths),
            cu_seqlens_q=cu_seqlens_q,
            max_seqlen_q=seqlen_q,
            scale=scale,
            causal=causal,
            window=window,
            softcap=softcap,
            # A decode step in a graph has a wider block table than the same step called eagerly,
            # and often more rows: its tokens must not depend on either.
            batch_invariant=cu_seqlens_q is None and seqlen_q == 1,
            return_lse=True,
        )
    out = out.view(*q.shape[:-1], v_cache.size(-1))
    if not return_softmax_lse:
        return out
    return out, _by_sequence(lse, batch, seqlen_q) if cu_seqlens_q is None else lse.t()


def _refuse(name: str, value: object, when: str = "here") -> None:
    if value is not None:
        got = "a tensor" if isinstance(value, torch.Tensor) else repr(value)
        raise ValueError(f"{name}: got {got}, expected None {when}")


def _refuse_others(
    dropout_p: float,
    alibi_slopes: torch.Tensor | None,
    qv: torch.Tensor | None,
    q_descale: torch.Tensor | None,
    k_descale: torch.Tensor | None,
    v_descale: torch.Tensor | None,
    attention_chunk: int,
) -> None:
    if dropout_p != 0:
        raise ValueError(f"dropout_p: got {dropout_p!r}, expected 0: there is no dropout")
    _refuse("alibi_slopes", alibi_slopes)
    _refuse("qv", qv)
    _refuse("q_descale", q_descale)
    _refuse("k_descale", k_descale)
    _refuse("v_descale", v_descale)
    if attention_chunk != 0:
        raise ValueError(f"attention_chunk: got {attention_chunk!r}, expected 0")


def _refuse_gradients(*tensors: object) -> None:
    if torch.is_grad_enabled() and any(
        isinstance(x, torch.Tensor) and x.requires_grad for x in tensors
    ):
        raise ValueError(
            "q, k, v: got a tensor that requires a gradient, expected none: there is no backward "
            "pass (torch.no_grad() says that none is wanted)"
        )


def _check_batched(name: str, x: torch.Tensor, batch: int | None = None) -> None:
    _check_tensor(name, x)
    if x.ndim != 4 or batch not in (None, x.size(0)):
        first = "batch" if batch is None else batch
        raise ValueError(
            f"{name}: got shape {list(x.shape)}, expected [{first}, seqlen, heads, dim]"
        )


def _check_tensor(name: str, x: torch.Tensor) -> None:
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name}: got {type(x).__name__}, expected a tensor")
    if x.dtype not in checks.FLOAT_DTYPES:
        raise TypeError(f"{name}: got dtype {x.dtype}, expected bf16, fp16 or fp32")


def _dense(name: str, x: torch.Tensor) -> torch.Tensor:
    _check_tensor(name, x)
    return x if x.stride(-1) == 1 else x.contiguous()


def _scale(softmax_scale: float | None) -> float | None:
    if softmax_scale is not None:
        checks.number("softmax_scale", softmax_scale)
    return softmax_scale


def _most(name: str, max_seqlen: int | torch.Tensor) -> int:
    """Return how many rows a sequence may have, as our ops take it: at least 1."""
    if isinstance(max_seqlen, torch.Tensor):  # as of cu_seqlens.diff().max()
        if max_seqlen.ndim or max_seqlen.is_floating_point():
            raise TypeError(f"{name}: got a tensor of {max_seqlen.dtype}, expected an int")
        max_seqlen = int(max_seqlen)
    checks.integer(name, max_seqlen, least=0)
    return max(max_seqlen, 1)


def _window(window_size: Sequence[int] | None) -> tuple[int, int] | None:
    if window_size is None:
        return None
    if not isinstance(window_size, Sequence) or len(window_size) != 2:
        raise ValueError(f"window_size: got {window_size!r}, expected (left, right)")
    left, right = window_size
    checks.integer("window_size", left, least=-checks.INT32_MAX)
    checks.integer("window_size", right, least=-checks.INT32_MAX)
    return None if left < 0 and right < 0 else (max(left, -1), max(right, -1))


def _offsets(batch: int, seqlen: int, device: torch.device) -> torch.Tensor:
    return torch.arange(batch + 1, dtype=torch.int32, device=device) * seqlen


def _lengths(
    cu_seqlens_k: torch.Tensor | None, seqused_k: torch.Tensor | None, block_table: torch.Tensor
) -> torch.Tensor:
    batch = block_table.size(0)
    if seqused_k is not None:
        checks.tensor("seqused_k", seqused_k, _INT32, (batch,), block_table.device)
        return seqused_k
    if cu_seqlens_k is None:
        raise ValueError("cu_seqlens_k: got None, expected it or seqused_k")
    checks.tensor("cu_seqlens_k", cu_seqlens_k, _INT32, (batch + 1,), block_table.device)
    return cu_seqlens_k.diff()


def _by_sequence(lse: torch.Tensor, batch: int, seqlen: int) -> torch.Tensor:
    return lse.view(batch, seqlen, lse.size(1)).transpose(1, 2)
