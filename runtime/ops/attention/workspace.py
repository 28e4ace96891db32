"""How large a workspace of attention must be, from capacities alone."""

from __future__ import annotations

import torch

from ..common import checks
from ..common.device import device_index, runs
from . import decode_cuda, dequantize_kv, prefill_cuda
from .decode_variants import AttentionDecode
from .prefill_variants import AttentionPrefill


def paged_attention_workspace(
    dtype: torch.dtype,
    heads_q: int,
    heads_kv: int,
    head_dim: int,
    *,
    max_batch: int,
    max_pages: int,
    page_size: int,
    max_seqlen_q: int = 1,
    max_tokens_k: int | None = None,
    kv_dtype: torch.dtype | None = None,
    batch_invariant: bool = False,
    device: torch.device | str = "cuda",
) -> int:
    """Return the bytes that suffice as `workspace` of `paged_attention` within these capacities.

    A few MB, whatever the lengths; with `batch_invariant` more if the capacity of a sequence is
    above 1024 tokens: for each 1024 of them and each KV head about the bytes of the queries in
    fp32. Where calls are not decode steps alone, and the cache has 8 bits, they hold `max_tokens_k`
    tokens of it in 16 bits. Kernels that are not compiled yet are compiled.

    Args:
        dtype: of the queries: bf16, fp16 or fp32.
        heads_q: query heads, a multiple of `heads_kv`.
        heads_kv: KV heads.
        head_dim: of queries and keys.
        max_batch: the most sequences of a call.
        max_pages: columns of `page_table`.
        page_size: tokens of a page.
        max_seqlen_q: the largest that calls are given.
        max_tokens_k: likewise; None where calls are given None. With a `max_seqlen_q` of 1 None
            stands for decode steps alone, which have no `cu_seqlens_q`.
        kv_dtype: of the caches: `dtype`, which None means, int8 or e4m3.
        batch_invariant: as calls are given it.
        device: where the calls run.

    Returns:
        Bytes; 0 where no kernel of ours runs, whose calls use no workspace.

    Raises:
        TypeError, ValueError: naming the argument.
    """
    checks.option("dtype", dtype, checks.FLOAT_DTYPES)
    kv_dtype = dtype if kv_dtype is None else kv_dtype
    checks.option("kv_dtype", kv_dtype, (dtype, *checks.QUANTIZED_DTYPES))
    for name, value in (
        ("heads_kv", heads_kv),
        ("heads_q", heads_q),
        ("head_dim", head_dim),
        ("max_batch", max_batch),
        ("max_pages", max_pages),
        ("page_size", page_size),
        ("max_seqlen_q", max_seqlen_q),
    ):
        checks.integer(name, value, least=1)
    if max_tokens_k is not None:
        checks.integer("max_tokens_k", max_tokens_k, least=0)
    if heads_q % heads_kv:
        raise ValueError(f"heads_q: got {heads_q}, expected a multiple of heads_kv = {heads_kv}")
    checks.flag("batch_invariant", batch_invariant)
    place = torch.device(device)
    if place.type != "cuda":
        return 0
    index = device_index(place)
    decode = prefill = behind = 0
    if runs(AttentionDecode, index):
        decode = decode_cuda.workspace_bytes(
            dtype,
            kv_dtype,
            heads_q // heads_kv,
            heads_kv,
            head_dim,
            max_batch=max_batch,
            max_pages=max_pages,
            page_size=page_size,
            max_seqlen_q=max_seqlen_q,
            batch_invariant=batch_invariant,
            device=index,
        )
    if runs(AttentionPrefill, index):
        quantized = kv_dtype != dtype
        kernels = prefill_cuda.prefill_kernels(
            dtype, head_dim, quantized=quantized, batch_invariant=batch_invariant
        )
        prefill = prefill_cuda.workspace_bytes(kernels, index)
        if quantized and kernels and (max_seqlen_q > 1 or max_tokens_k is not None):
            most = max_batch * max_pages * page_size
            tokens = most if max_tokens_k is None else min(max_tokens_k, most)
            behind = dequantize_kv.dequantized_bytes(tokens, heads_kv, head_dim, head_dim)
    return max(decode, prefill) + behind


def varlen_attention_workspace(
    dtype: torch.dtype,
    head_dim: int,
    *,
    value_dim: int | None = None,
    out_dtype: torch.dtype | None = None,
    kv_dtype: torch.dtype | None = None,
    heads_kv: int = 1,
    max_tokens_k: int = 0,
    device: torch.device | str = "cuda",
) -> int:
    """Return the bytes that suffice as `workspace` of `varlen_attention`, whatever the lengths.

    They hold the keys and values in 16 bits if `kv_dtype` is another dtype than `dtype`. Kernels
    that are not compiled yet are compiled.

    Args:
        dtype: of the queries: bf16, fp16, fp32 or e4m3.
        head_dim: of queries and keys.
        value_dim: of values; None is `head_dim`.
        out_dtype: of the output of e4m3 queries: bf16, which None means, or fp16.
        kv_dtype: of keys and values: `dtype`, which None means, int8 or e4m3.
        heads_kv: KV heads; of another `kv_dtype` than `dtype` only.
        max_tokens_k: the most rows of keys that calls are given; likewise.
        device: where the calls run.

    Returns:
        Bytes; 0 where no kernel of ours runs, whose calls use no workspace.

    Raises:
        TypeError, ValueError: naming the argument.
    """
    checks.option("dtype", dtype, (*checks.FLOAT_DTYPES, torch.float8_e4m3fn))
    checks.integer("head_dim", head_dim, least=1)
    value_dim = head_dim if value_dim is None else value_dim
    checks.integer("value_dim", value_dim, least=1)
    kv_dtype = dtype if kv_dtype is None else kv_dtype
    checks.option("kv_dtype", kv_dtype, (dtype, *checks.QUANTIZED_DTYPES))
    checks.integer("heads_kv", heads_kv, least=1)
    checks.integer("max_tokens_k", max_tokens_k, least=0)
    out_dtype = torch.bfloat16 if out_dtype is None else out_dtype
    checks.option("out_dtype", out_dtype, (torch.bfloat16, torch.float16))
    place = torch.device(device)
    if place.type != "cuda":
        return 0
    index = device_index(place)
    if not runs(AttentionPrefill, index):
        return 0
    kernels = prefill_cuda.packed_kernels(dtype, head_dim, value_dim, out_dtype)
    needed = prefill_cuda.workspace_bytes(kernels, index)
    if kernels and kv_dtype != dtype:
        needed += dequantize_kv.dequantized_bytes(max_tokens_k, heads_kv, head_dim, value_dim)
    return needed
