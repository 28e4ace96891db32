"""Prefill attention on CUDA: from tensors to a launch of csrc/attention/prefill/prefill_sm90.cu."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import torch

from ...jit.loader import load
from ..common import pdl
from ..common.checks import QUANTIZED_DTYPES
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
_MOST_SEQUENCES = 512  # of a launch (csrc: kMaxBatch); more take several
_MOST_TOKENS = 1 << 29  # of a sequence (csrc: kFarthest)
_DIMS_8_BIT = (64, 128, 256)  # of FP8 queries, and of 8-bit keys and values
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


class KvScales(NamedTuple):
    """The fp32 factors of 8-bit keys and values: a scalar, [heads_kv], or one a token and head."""

    k: torch.Tensor
    v: torch.Tensor

    @property
    def of_tokens(self) -> bool:
        """Whether tokens have their own."""
        return max(self.k.ndim, self.v.ndim) > 1


def packed_variant(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    batch: int = 1,
    max_seqlen_q: int = 0,
    scales: KvScales | None = None,
) -> AttentionPrefill | None:
    """Return the kernel that attends to packed keys and values, None where none does.

    The arguments are those of `varlen_attention`, checked; `batch` is the number of sequences, and
    `scales` are those of 8-bit keys and values.
    """
    if max(q.size(0), k.size(0)) >= _MOST_TOKENS or not _serves(q, k, v, out, scales):
        return None
    kernel = kernel_for(q.dtype, q.size(2), "packed", v.size(2), k.dtype, _of_tokens(scales))
    return None if kernel is None else _with_rows(kernel, q, batch, max_seqlen_q)


def _with_rows(
    kernel: AttentionPrefill, q: torch.Tensor, batch: int, max_seqlen_q: int
) -> AttentionPrefill:
    """Return the kernel, or that of larger tiles where there is one and it is done sooner."""
    if kernel.head_dim == kernel.value_dim == 128 and not kernel.token_scales:
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
    scales: KvScales | None = None,
) -> AttentionPrefill | None:
    """Return the kernel that attends to a paged cache, None where none does.

    The arguments are those of `paged_attention`, checked; `scales` are those of an 8-bit cache.
    With `batch_invariant` the kernel does not depend on how many queries there are.
    """
    page_size = k_cache.size(1)
    if (
        max(q.size(0), page_table.size(1) * page_size) >= _MOST_TOKENS
        or k_cache.size(0) == 0
        or not _serves(q, k_cache, v_cache, out, scales)
    ):
        return None
    copied = (
        k_cache.dtype == q.dtype and page_size % _PAGE == 0 and _has_copied_heads(k_cache, v_cache)
    )
    keys = "pages" if copied else "slots"
    kernel = kernel_for(
        q.dtype, q.size(2), keys, v_cache.size(3), k_cache.dtype, _of_tokens(scales)
    )
    if kernel is None or batch_invariant or (not copied and k_cache.dtype == q.dtype):
        return kernel
    return _with_rows(kernel, q, page_table.size(0), max_seqlen_q)


@cache
def kernel_for(
    dtype: torch.dtype,
    dim: int,
    keys: str,
    value_dim: int | None = None,
    kv_dtype: torch.dtype | None = None,
    token_scales: bool = False,
) -> AttentionPrefill | None:
    """Return the kernel for keys that lie so (`AttentionPrefill`), None where there is none.

    Args:
        dtype: of queries and the output.
        dim: of queries and keys.
        keys: where they lie.
        value_dim: of values and the output; None is `dim`.
        kv_dtype: of keys and values; None is `dtype`.
        token_scales: whether 8-bit keys and values have scales of each token.
    """
    value_dim = dim if value_dim is None else value_dim
    kv_dtype = dtype if kv_dtype is None else kv_dtype
    if kv_dtype != dtype and (
        kv_dtype not in QUANTIZED_DTYPES or dim not in _DIMS_8_BIT or value_dim != dim
    ):
        return None
    if (
        dtype not in (torch.bfloat16, torch.float16)
        or any(size % 16 or not 16 <= size <= 256 for size in (dim, value_dim))
        or value_dim > AttentionPrefill.widest_values(dim)
    ):
        return None
    return AttentionPrefill(
        head_dim=dim,
        value_dim=value_dim,
        dtype=KERNEL_NAMES[dtype],
        kv_dtype=KERNEL_NAMES[kv_dtype],
        token_scales=token_scales,
        keys=keys,
    )


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
        max(q.size(0), k.size(0)) >= _MOST_TOKENS
        or q.dtype is not torch.float8_e4m3fn
        or q.size(2) not in _DIMS_8_BIT
        or v.size(2) != q.size(2)
        or any(scale.ndim > 1 for scale in scales)
        or not _serves(q, k, v, out, scales)
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
        served = dim in _DIMS_8_BIT and value_dim == dim
        kernel = _fp8_kernel(dim, out_dtype) if served else None
    else:
        kernel = kernel_for(dtype, dim, "packed", value_dim)
    if kernel is None:
        return []
    if not dim == value_dim == 128:
        return [kernel]
    return [kernel, replace(kernel, warpgroups=3)]


def prefill_kernels(
    dtype: torch.dtype,
    dim: int,
    *,
    kv_dtype: torch.dtype | None = None,
    token_scales: bool = False,
    batch_invariant: bool = True,
) -> list[AttentionPrefill]:
    """Return what a model's prompts take, whatever a page's size and however many there are.

    Args:
        dtype: of the queries.
        dim: of a head.
        kv_dtype: of the cache; None is `dtype`.
        token_scales: whether an 8-bit cache has scales of each token.
        batch_invariant: as `paged_attention` is called.
    """
    slots = kernel_for(dtype, dim, "slots", kv_dtype=kv_dtype, token_scales=token_scales)
    pages = kernel_for(dtype, dim, "pages") if kv_dtype in (None, dtype) else None
    usual, many = pages or slots, None
    if usual is not None and dim == 128 and not (batch_invariant or token_scales):
        many = replace(usual, warpgroups=3)
    return [kernel for kernel in (pages, many, slots) if kernel is not None]


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
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    rule: LogitRule,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    workspace: torch.Tensor | None,
    scales: Fp8Scales | KvScales | None = None,
) -> None:
    """Launch the kernel that `packed_variant` or `fp8_variant` chose on torch's current stream.

    The kernel before it on the stream may still be writing any of these.

    Raises:
        ValueError: for a workspace that is too small.
        OutOfMemoryError: torch's, when there is no room for one.
    """
    batch = cu_seqlens_q.size(0) - 1
    for first in range(0, batch, _MOST_SEQUENCES):
        _launch(
            kernel,
            q,
            max_seqlen_q,
            rule,
            sinks,
            out,
            lse,
            workspace,
            heads_kv=k.size(1),
            batch=min(batch - first, _MOST_SEQUENCES),
            k=_packed_slots(k),
            v=_packed_slots(v),
            cu_seqlens_q=address_of_row(cu_seqlens_q, first),
            cu_seqlens_k=address_of_row(cu_seqlens_k, first),
            tokens_k=k.size(0),
            max_seqlen_k=max_seqlen_k,
            **_scale_arguments(scales),
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
    scales: KvScales | None = None,
) -> None:
    """Launch the kernel that `paged_variant` chose; else as `attend_packed`."""
    batch = seq_lens.size(0)
    for first in range(0, batch, _MOST_SEQUENCES):
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
            batch=min(batch - first, _MOST_SEQUENCES),
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
            **_scale_arguments(scales),
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


def _serves(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    scales: Fp8Scales | KvScales | None,
) -> bool:
    """Return whether our kernels run on the device and can read these."""
    return (
        has_kernel(AttentionPrefill, q)
        and (k.dtype == q.dtype or scales is not None)
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


def _scale_arguments(scales: Fp8Scales | KvScales | None) -> dict[str, Any]:
    """Return addresses and strides; those of a scalar are 0."""
    if _of_tokens(scales):
        assert scales is not None
        return {"k_token_scale": _scale_slots(scales.k), "v_token_scale": _scale_slots(scales.v)}
    arguments: dict[str, Any] = {}
    for name, scale in ({} if scales is None else scales._asdict()).items():
        arguments[f"{name}_scale"] = scale.data_ptr()
        arguments[f"{name}_scale_stride"] = scale.stride(0) if scale.numel() > 1 else 0
    return arguments


def _of_tokens(scales: Fp8Scales | KvScales | None) -> bool:
    return isinstance(scales, KvScales) and scales.of_tokens


def _scale_slots(scale: torch.Tensor) -> tuple[int, int, int, int]:
    """Return the address and strides of scales, of pages or of packed [tokens, heads]."""
    if scale.ndim == 2:
        return (scale.data_ptr(), 0, scale.stride(0), scale.stride(1))
    return slots_of(scale)


def _packed_slots(x: torch.Tensor) -> tuple[int, int, int, int]:
    """Return the address and strides of packed [tokens, heads, dim]: there are no pages."""
    data, stride, head_stride = heads_of(x)
    return (data, 0, stride, head_stride)
