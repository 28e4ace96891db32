"""Prefill attention on CUDA: from tensors to a launch of csrc/attention/prefill/prefill_sm90.cu."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import torch

from ...jit.loader import load
from ..common import pdl
from ..common.device import (
    KERNEL_NAMES,
    address_of,
    address_of_row,
    current_stream,
    gpu,
    has_kernel,
    heads_of,
    in_vectors,
    on_device,
    slots_of,
)
from ..common.workspace import Workspaces, given
from .prefill_variants import AttentionPrefill
from .softmax_torch import LogitRule

_PAGE = 16  # tokens; TMA copies pages of a multiple of it
_PAGED = ("pages", "slots")  # where the keys of a cache lie, those of whole pages first
MOST_SEQUENCES = 512  # of a launch (csrc: kMaxBatch); more take several
MOST_TOKENS = 1 << 29  # of a sequence (csrc: kFarthest)
_FP8_DIMS = (64, 128, 256)
# Of 128 columns, packed or in pages, there are tiles of two sizes. The cost is that of a query and
# key in the larger ones, beside the others' (docs/notebooks/prefill.md); with so many for each
# multiprocessor none waits long.
_ROWS, _MANY_ROWS = 128, 192
_MANY_ROWS_COST = 0.94
_MANY_TILES = 4
# With 8 bits the larger tiles gain only where many tiles of keys follow one another.
_LEAST_FP8_QUERIES = 2048
_VECTOR_BYTES = 16
_STRIP_BYTES = 128  # of a row, that are copied together
# Heads of a group whose queries share tiles. The kernel chooses by the average of the queries, and
# with it in which order a query's keys are added up.
_KERNELS_CHOICE, _ONE_HEAD = 0, 1

_workspaces = Workspaces()


def packed_variant(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    batch: int = 1,
    max_seqlen_q: int = 0,
) -> AttentionPrefill | None:
    """Return the kernel that attends to packed keys and values, None where none does.

    The arguments are those of `varlen_attention`, checked; `batch` is the number of sequences.
    """
    if k.dtype != q.dtype or k.size(0) >= MOST_TOKENS or not serves(q, k, v, out):
        return None
    return kernel_of_packed(q, v.size(2), batch, max_seqlen_q)


def kernel_of_packed(
    q: torch.Tensor, value_dim: int, batch: int, max_seqlen_q: int, batch_invariant: bool = False
) -> AttentionPrefill | None:
    """Return the kernel for packed keys and values of the dtype of q, None where there is none.

    Args:
        q: the queries.
        value_dim: of values.
        batch: how many sequences there are.
        max_seqlen_q: the most queries that one of them has.
        batch_invariant: do not choose by the queries.
    """
    kernel = kernel_for(q.dtype, q.size(2), "packed", value_dim)
    if kernel is None or batch_invariant:
        return kernel
    return _with_rows(kernel, q, batch, max_seqlen_q)


def _with_rows(
    kernel: AttentionPrefill, q: torch.Tensor, batch: int, max_seqlen_q: int
) -> AttentionPrefill:
    """Return the kernel, or that of larger tiles where there is one and it is done sooner."""
    if kernel.head_dim == kernel.value_dim == 128:
        tiles, larger_tiles = (
            q.size(1) * min(batch * -(-max_seqlen_q // rows), q.size(0) // rows + batch)
            for rows in (_ROWS, _MANY_ROWS)
        )
        if prefers_many_rows(tiles, larger_tiles, gpu(q.get_device())[1]):
            return replace(kernel, warpgroups=3)
    return kernel


def prefers_many_rows(tiles: int, larger_tiles: int, sms: int) -> bool:
    """Return whether tiles of 192 queries, each of which is faster for its size, are done sooner.

    With few tiles what counts is the multiprocessor that has the most of them.

    Args:
        tiles: of 128 queries, of all sequences and heads.
        larger_tiles: of 192 queries.
        sms: multiprocessors, which take a tile each.
    """
    if larger_tiles >= _MANY_TILES * sms:
        return True
    rounds, larger_rounds = -(-tiles // sms), -(-larger_tiles // sms)
    return larger_rounds * _MANY_ROWS * _MANY_ROWS_COST < rounds * _ROWS


def paged_variant(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    out: torch.Tensor,
    max_seqlen_q: int = 0,
    batch_invariant: bool = True,
) -> AttentionPrefill | None:
    """Return the kernel that attends to a paged cache of the dtype of q, None where none does.

    The arguments are those of `paged_attention`, checked. With `batch_invariant` the kernel does
    not depend on how many queries there are.
    """
    page_size = k_cache.size(1)
    if (
        k_cache.dtype != q.dtype
        or page_table.size(1) * page_size >= MOST_TOKENS
        or k_cache.size(0) == 0
        or not serves(q, k_cache, v_cache, out)
    ):
        return None
    copied = page_size % _PAGE == 0 and _has_copied_heads(k_cache, v_cache)
    keys = "pages" if copied else "slots"
    kernel = kernel_for(q.dtype, q.size(2), keys, v_cache.size(3))
    if kernel is None or batch_invariant or not copied:
        return kernel
    return _with_rows(kernel, q, page_table.size(0), max_seqlen_q)


@cache
def kernel_for(
    dtype: torch.dtype, dim: int, keys: str, value_dim: int | None = None
) -> AttentionPrefill | None:
    """Return the kernel for keys that lie so (`AttentionPrefill`), None where there is none.

    Args:
        dtype: of queries, keys and values.
        dim: of queries and keys.
        keys: where they lie.
        value_dim: of values and the output; None is `dim`.
    """
    value_dim = dim if value_dim is None else value_dim
    if (
        dtype not in (torch.bfloat16, torch.float16)
        or any(size % 16 or not 16 <= size <= 256 for size in (dim, value_dim))
        or value_dim > AttentionPrefill.widest_values(dim)
    ):
        return None
    return AttentionPrefill(head_dim=dim, value_dim=value_dim, dtype=KERNEL_NAMES[dtype], keys=keys)


class Fp8Scales(NamedTuple):
    """The fp32 factors of FP8 queries, keys and values: a scalar or [heads_kv] each."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


def fp8_variant(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    scales: Fp8Scales,
    batch: int = 1,
    max_seqlen_q: int = 0,
    windowed: bool = False,
) -> AttentionPrefill | None:
    """Return the kernel that attends from packed FP8 queries to FP8 keys, None where none does.

    The arguments are those of `varlen_attention`, checked; `batch` is the number of sequences, and
    `windowed` says whether a query sees only some of the keys before it.
    """
    if (
        k.size(0) >= MOST_TOKENS
        or q.dtype is not torch.float8_e4m3fn
        or q.size(2) not in _FP8_DIMS
        or v.size(2) != q.size(2)
        or any(scale.ndim > 1 for scale in scales)
        or k.dtype != q.dtype
        or not serves(q, k, v, out)
    ):
        return None
    kernel = _fp8_kernel(q.size(2), out.dtype)
    if windowed or max_seqlen_q < _LEAST_FP8_QUERIES:
        return kernel
    return _with_rows(kernel, q, batch, max_seqlen_q)


def _fp8_kernel(dim: int, out_dtype: torch.dtype) -> AttentionPrefill:
    return AttentionPrefill(head_dim=dim, dtype="e4m3", out_dtype=KERNEL_NAMES[out_dtype])


def packed_kernels(
    dtype: torch.dtype, dim: int, value_dim: int, out_dtype: torch.dtype
) -> list[AttentionPrefill]:
    """Return what `varlen_attention` takes for packed keys and values, however many there are.

    Args:
        dtype: of queries, keys and values.
        dim: of queries and keys.
        value_dim: of values.
        out_dtype: of the output of FP8 queries.
    """
    kernel: AttentionPrefill | None
    if dtype is torch.float8_e4m3fn:
        served = dim in _FP8_DIMS and value_dim == dim
        kernel = _fp8_kernel(dim, out_dtype) if served else None
    else:
        kernel = kernel_for(dtype, dim, "packed", value_dim)
    if kernel is None:
        return []
    if not dim == value_dim == 128:
        return [kernel]
    return [kernel, replace(kernel, warpgroups=3)]


def prefill_kernels(
    dtype: torch.dtype, dim: int, *, quantized: bool = False, batch_invariant: bool = True
) -> list[AttentionPrefill]:
    """Return what a model's prompts take, whatever a page's size and however many there are.

    Args:
        dtype: of the queries.
        dim: of a head.
        quantized: whether the cache has 8 bits, and is dequantised before it is attended to.
        batch_invariant: as `paged_attention` is called.
    """
    found = [kernel_for(dtype, dim, keys) for keys in (("packed",) if quantized else _PAGED)]
    if found[0] is not None and dim == 128 and not batch_invariant:
        found.insert(1, replace(found[0], warpgroups=3))
    return [kernel for kernel in found if kernel is not None]


def workspace_bytes(kernels: Sequence[AttentionPrefill], device: int) -> int:
    """Return the bytes that suffice for launches of any of the kernels; 0 of none."""
    with on_device(device):
        stream = current_stream(device)
        libraries = [load(kernel, device=device, stream=stream) for kernel in kernels]
        return max((library.workspace_bytes() for library in libraries), default=0)


def attend_packed(
    kernel: AttentionPrefill,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    rule: LogitRule,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    workspace: torch.Tensor | None,
    scales: Fp8Scales | None = None,
    batch_invariant: bool = False,
) -> None:
    """Launch the kernel for packed keys and values that was chosen, on torch's current stream.

    The kernel before it on the stream may still be writing any of these. Without `cu_seqlens_q`
    each sequence has `max_seqlen_q` rows of q; `batch_invariant` is as of `paged_attention`.

    Raises:
        ValueError: for a workspace that is too small.
        OutOfMemoryError: torch's, when there is no room for one.
    """
    batch = cu_seqlens_k.size(0) - 1
    for first in range(0, batch, MOST_SEQUENCES):
        _launch(
            kernel,
            q,
            max_seqlen_q,
            rule,
            sinks,
            out,
            lse,
            workspace,
            # The first row, unless cu_seqlens_q names them.
            row=0 if cu_seqlens_q is not None else first * max_seqlen_q,
            heads_kv=k.size(1),
            batch=min(batch - first, MOST_SEQUENCES),
            k=packed_slots(k),
            v=packed_slots(v),
            cu_seqlens_q=0 if cu_seqlens_q is None else address_of_row(cu_seqlens_q, first),
            cu_seqlens_k=address_of_row(cu_seqlens_k, first),
            tokens_k=k.size(0),
            max_seqlen_k=max_seqlen_k,
            pack=_ONE_HEAD if batch_invariant else _KERNELS_CHOICE,
            **({} if scales is None else _scale_arguments(scales)),
        )


def attend_paged(
    kernel: AttentionPrefill,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None,
    max_seqlen_q: int,
    rule: LogitRule,
    sinks: torch.Tensor | None,
    batch_invariant: bool,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    workspace: torch.Tensor | None,
) -> None:
    """Launch the kernel that `paged_variant` chose; else as `attend_packed`."""
    batch = seq_lens.size(0)
    for first in range(0, batch, MOST_SEQUENCES):
        _launch(
            kernel,
            q,
            max_seqlen_q,
            rule,
            sinks,
            out,
            lse,
            workspace,
            # The first row, unless cu_seqlens_q names them.
            row=0 if cu_seqlens_q is not None else first * max_seqlen_q,
            heads_kv=k_cache.size(2),
            batch=min(batch - first, MOST_SEQUENCES),
            k=slots_of(k_cache),
            v=slots_of(v_cache),
            cu_seqlens_q=0 if cu_seqlens_q is None else address_of_row(cu_seqlens_q, first),
            seq_lens=address_of_row(seq_lens, first),
            page_table=address_of_row(page_table, first),
            page_table_stride=page_table.stride(0),
            pages=k_cache.size(0),
            page_size=k_cache.size(1),
            max_pages=page_table.size(1),
            pack=_ONE_HEAD if batch_invariant else _KERNELS_CHOICE,
        )


def _launch(
    kernel: AttentionPrefill,
    q: torch.Tensor,
    max_seqlen_q: int,
    rule: LogitRule,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    workspace: torch.Tensor | None,
    *,
    row: int = 0,
    **keys: Any,
) -> None:
    """Launch for the rows of q from `row` on; `keys` are the launch's other arguments."""
    if q.size(0) == 0:
        return
    device = q.get_device()
    with on_device(device):
        stream = current_stream(device)
        library = load(kernel, device=device, stream=stream)
        needed = library.workspace_bytes()
        if workspace is None:
            workspace = _workspaces.get(device, stream, needed)
        else:
            workspace = given(workspace, needed)
        library.launch(
            q=heads_of(q, row),
            out=heads_of(out, row),
            lse=heads_of(lse, row),
            heads_q=q.size(1),
            tokens_q=q.size(0) - row,
            max_seqlen_q=max_seqlen_q,
            scale=rule.scale,
            softcap=rule.softcap,
            left=rule.left,
            right=0 if rule.causal else rule.right,
            sinks=address_of(sinks),
            workspace=workspace.data_ptr(),
            pdl=pdl.enabled(),
            stream=stream,
            **keys,
        )


def serves(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> bool:
    """Return whether our kernels run on the device and can read these."""
    return (
        has_kernel(AttentionPrefill, q)
        and q.size(0) < MOST_TOKENS
        and all(in_vectors(x, _VECTOR_BYTES) for x in (q, k, v, out))
    )


def _has_copied_heads(keys: torch.Tensor, values: torch.Tensor) -> bool:
    """Return whether heads begin where pages are copied from (csrc: kSideBySide)."""
    size = keys.element_size()
    if keys.stride(2) * size % _STRIP_BYTES == 0 == values.stride(2) * size % _STRIP_BYTES:
        return True
    widths = keys.size(3) * size, values.size(3) * size
    if max(widths) <= _STRIP_BYTES or any(width % _STRIP_BYTES for width in widths):
        return True
    return keys.size(2) == 1


def _scale_arguments(scales: Fp8Scales) -> dict[str, int]:
    """Return addresses and strides; the stride of a scalar is 0."""
    arguments = {}
    for name, scale in scales._asdict().items():
        arguments[f"{name}_scale"] = scale.data_ptr()
        arguments[f"{name}_scale_stride"] = scale.stride(0) if scale.numel() > 1 else 0
    return arguments


def packed_slots(x: torch.Tensor) -> tuple[int, int, int, int]:
    """Return the address and strides of packed [tokens, heads, dim]: there are no pages."""
    data, stride, head_stride = heads_of(x)
    return (data, 0, stride, head_stride)
