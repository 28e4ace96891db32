"""Checks of the attention ops' arguments, on shapes always and on device data when asked."""

from __future__ import annotations

from itertools import pairwise

import torch

from ..common import checks
from .softmax_torch import LogitRule

_INT32 = (torch.int32,)
_FLOAT32 = (torch.float32,)
FP8 = torch.float8_e4m3fn

# No sequence is longer, so that a wider window is one without a limit.
_WIDEST_WINDOW = 2**31 - 1
# By less a logit is not to be divided in fp32.
_LEAST_SOFTCAP = 1e-30


def paged(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None,
    max_seqlen_q: int,
) -> None:
    """Check the tensors of `paged_attention` and how their shapes agree."""
    checks.tensor("q", q, checks.FLOAT_DTYPES, ("tokens", "heads_q", "dim"))
    device = q.device
    caches(k_cache, v_cache, q.dtype, q.size(2), device, value_dim="value_dim")
    _groups(q, k_cache.size(2))
    checks.tensor("page_table", page_table, _INT32, ("batch", "max_pages"), device)
    checks.not_empty("page_table", page_table, "max_pages")
    batch = page_table.size(0)
    checks.tensor("seq_lens", seq_lens, _INT32, (batch,), device)
    checks.integer("max_seqlen_q", max_seqlen_q, least=1)
    if cu_seqlens_q is not None:
        checks.tensor("cu_seqlens_q", cu_seqlens_q, _INT32, (batch + 1,), device)
    elif q.size(0) != batch * max_seqlen_q:
        raise ValueError(
            f"q: got {q.size(0)} tokens, expected batch * max_seqlen_q = "
            f"{batch} * {max_seqlen_q} when cu_seqlens_q is None"
        )


def varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
) -> None:
    """Check the tensors of `varlen_attention` and how their shapes agree."""
    checks.tensor("q", q, (*checks.FLOAT_DTYPES, FP8), ("total_q", "heads_q", "dim"))
    device = q.device
    dtypes = (FP8,) if q.dtype is FP8 else (q.dtype, *checks.QUANTIZED_DTYPES)
    checks.tensor("k", k, dtypes, ("total_k", "heads_kv", q.size(2)), device)
    checks.not_empty("k", k, "heads_kv", "dim")
    _values("v", v, k, "value_dim")
    _groups(q, k.size(1))
    checks.tensor("cu_seqlens_q", cu_seqlens_q, _INT32, ("batch + 1",), device)
    checks.not_empty("cu_seqlens_q", cu_seqlens_q, "batch + 1")
    checks.tensor("cu_seqlens_k", cu_seqlens_k, _INT32, (cu_seqlens_q.size(0),), device)
    checks.integer("max_seqlen_q", max_seqlen_q, least=1)
    checks.integer("max_seqlen_k", max_seqlen_k, least=1)


def caches(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    dtype: torch.dtype,
    dim: int,
    device: torch.device,
    value_dim: int | str,
) -> None:
    """Check a paged cache: of `dtype` or quantised, both parts alike, with at least one page.

    Values have `value_dim` elements where keys have `dim`; a name stands for any number.
    """
    dtypes = (dtype, *checks.QUANTIZED_DTYPES)
    shape = ("pages", "page_size", "heads_kv", dim)
    checks.tensor("k_cache", k_cache, dtypes, shape, device)
    checks.not_empty("k_cache", k_cache, "pages", "page_size", "heads_kv", "dim")
    _values("v_cache", v_cache, k_cache, value_dim)


def scales(keys: torch.Tensor, k_scale: torch.Tensor | None, v_scale: torch.Tensor | None) -> None:
    """Check k_scale and v_scale against a cache or packed keys: needed just if quantised."""
    quantized = keys.dtype in checks.QUANTIZED_DTYPES
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if not quantized:
            if scale is not None:
                raise ValueError(f"{name}: got a tensor, expected None for {keys.dtype} keys")
            continue
        if scale is None:
            raise ValueError(f"{name}: got None, expected an fp32 tensor for {keys.dtype} keys")
        if getattr(scale, "ndim", 0) == keys.ndim - 1:
            checks.tensor(name, scale, _FLOAT32, keys.shape[:-1], keys.device, any_strides=True)
        else:
            checks.scalar_or_vector(name, scale, torch.float32, keys.size(-2), keys.device)


def query_scale(q: torch.Tensor, q_scale: torch.Tensor | None, heads_kv: int) -> None:
    """Check the q_scale of `varlen_attention`: needed just for FP8 queries."""
    if q.dtype is not FP8:
        if q_scale is not None:
            raise ValueError(f"q_scale: got a tensor, expected None for {q.dtype} queries")
        return
    if q_scale is None:
        raise ValueError(f"q_scale: got None, expected an fp32 tensor for {q.dtype} queries")
    checks.scalar_or_vector("q_scale", q_scale, torch.float32, heads_kv, q.device)


def output_dtype(q: torch.Tensor, out: torch.Tensor | None) -> torch.dtype:
    """Return the dtype of the output: that of the queries, for FP8 that of `out` or bf16.

    Raises:
        TypeError: when `out` has no such dtype.
    """
    if q.dtype is not FP8:
        return q.dtype
    if out is None:
        return torch.bfloat16
    if getattr(out, "dtype", None) not in (torch.bfloat16, torch.float16):
        got = f"dtype {out.dtype}" if isinstance(out, torch.Tensor) else type(out).__name__
        raise TypeError(f"out: got {got}, expected torch.bfloat16 or torch.float16")
    return out.dtype


def options(
    q: torch.Tensor,
    value_dim: int,
    scale: float | None,
    causal: bool,
    window: tuple[int, int] | None,
    softcap: float,
    sinks: torch.Tensor | None,
    out: torch.Tensor | None,
    workspace: torch.Tensor | None,
) -> LogitRule:
    """Check what both attention ops take beside their tensors; return how logits are formed.

    `q` and `value_dim`, the last dimension of the values and of `out`, are checked already.
    """
    if scale is None:
        scale = q.size(2) ** -0.5
    checks.number("scale", scale)
    checks.flag("causal", causal)
    checks.number("softcap", softcap, least=0.0)
    if 0 < softcap < _LEAST_SOFTCAP:
        raise ValueError(f"softcap: got {softcap}, expected 0 or at least {_LEAST_SOFTCAP}")
    left = right = -1
    if window is not None:
        if not isinstance(window, tuple) or len(window) != 2:
            raise TypeError(f"window: got {window!r}, expected a tuple (left, right) or None")
        left, right = window
        checks.integer("window", left, least=-1)
        checks.integer("window", right, least=-1)
    if sinks is not None:
        checks.tensor("sinks", sinks, _FLOAT32, (q.size(1),), q.device)
    if out is not None:
        checks.output("out", out, (output_dtype(q, out),), (*q.shape[:2], value_dim), q.device)
    if workspace is not None:
        checks.tensor("workspace", workspace, (torch.uint8,), ("bytes",), q.device)
    left, right = min(left, _WIDEST_WINDOW), min(right, _WIDEST_WINDOW)
    return LogitRule(scale, causal, left, right, softcap)


def pages(
    k_cache: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    q_lens: list[int],
    rule: LogitRule,
    max_tokens_k: int | None = None,
) -> None:
    """Check the lengths and the ids of the pages that a query may see, reading them on the host."""
    count, page_size = k_cache.shape[:2]
    capacity = page_table.size(1) * page_size
    table, lengths = page_table.tolist(), seq_lens.tolist()
    for b, length in enumerate(lengths):
        if not 0 <= length <= capacity:
            raise ValueError(
                f"seq_lens: got {length} for sequence {b}, expected 0 to "
                f"max_pages * page_size = {capacity}"
            )
        if q_lens[b] == 0:
            continue
        first, _ = rule.span(length - q_lens[b], length)
        for entry in range(first // page_size, -(-length // page_size)):
            if not 0 <= table[b][entry] < count:
                raise ValueError(
                    f"page_table: got page {table[b][entry]} at [{b}, {entry}], "
                    f"expected 0 to {count - 1}"
                )
    tokens = sum(length for length, queries in zip(lengths, q_lens, strict=True) if queries)
    if max_tokens_k is not None and tokens > max_tokens_k:
        raise ValueError(
            f"max_tokens_k: got {max_tokens_k}, expected at least the {tokens} tokens of the "
            "sequences that have queries"
        )


def offsets(
    name: str, cu_seqlens: torch.Tensor, total: int, max_seqlen: int, *, from_zero: bool = True
) -> list[int]:
    """Return cu_seqlens, checked to rise from 0 to at most `total` by at most `max_seqlen` each.

    Without `from_zero` rows in front may belong to no sequence, too.
    """
    bounds: list[int] = cu_seqlens.tolist()
    if bounds[0] < 0 or (from_zero and bounds[0]):
        least = "0" if from_zero else "at least 0"
        raise ValueError(f"{name}: got {bounds[0]} first, expected {least}")
    for b, (start, stop) in enumerate(pairwise(bounds)):
        if not 0 <= stop - start <= max_seqlen:
            raise ValueError(
                f"{name}: got length {stop - start} for sequence {b}, expected 0 to {max_seqlen}"
            )
    if bounds[-1] > total:
        raise ValueError(f"{name}: got {bounds[-1]} last, expected at most {total} rows")
    return bounds


def _values(name: str, v: torch.Tensor, k: torch.Tensor, value_dim: int | str) -> None:
    """Check that values are like their keys, which are checked, but for the last dimension."""
    # Steps of decoding wait for the host: where shapes are equal it makes no other.
    equal = isinstance(v, torch.Tensor) and v.shape == k.shape
    checks.tensor(name, v, (k.dtype,), k.shape if equal else (*k.shape[:-1], value_dim), k.device)
    if not equal:
        checks.not_empty(name, v, "value_dim")


def _groups(q: torch.Tensor, heads_kv: int) -> None:
    checks.not_empty("q", q, "heads_q", "dim")
    if q.size(1) % heads_kv:
        raise ValueError(
            f"q: got heads_q = {q.size(1)}, expected a multiple of heads_kv = {heads_kv}"
        )
