"""Decode attention on CUDA: from tensors to a launch of csrc/attention/decode/decode_sm90.cu."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import product
from typing import get_args

import torch

from ...jit.loader import load
from ..common import pdl
from ..common.device import (
    KERNEL_NAMES,
    address_of,
    address_of_row,
    current_stream,
    has_kernel,
    heads_of,
    in_vectors,
    on_device,
    slots_of,
)
from ..common.workspace import Workspaces, given
from .decode_variants import SPLIT_TOKENS, AttentionDecode, DecodeLoad, decode_cluster
from .l2_partition import L2_WORDS
from .softmax_torch import LogitRule

_COLUMNS = (8, 16, 32, 64)
_PAGE = 16  # tokens; TMA copies pages of a multiple of it
_MOST_SEQUENCES = 512  # of a launch (csrc: kMaxBatch); more take several
# Capacities that the kernel's divisions allow: of a sequence, and of tiles of all.
_MOST_TOKENS, _MOST_TILES = 1 << 27, 1 << 29
_TILE_TOKENS = 64
_MOST_ROWS_OF_LONG_HEADS = 32  # of more than 128: the output of more does not fit in the registers
_VECTOR_BYTES = 16
# Loads, by segments, as many as sequences times KV heads, and by the most tokens that these have.
# Few leave most SMs without work unless CTAs share them; where they are split, each split gets one
# of the 62 clusters of four that an H200 runs. Many are half as many as its CTAs, or more: CTAs of
# their own end a segment sooner. Clusters read long ones faster, as long as there are fewer of them
# than CTAs.
_FEW_SEGMENTS, _FEW_TOKENS = 16, 16384
# Fixed splits take a power of two, so that a batch and the bucket it is padded to have one kernel.
_FEW_SPLIT_SEGMENTS, _FEW_SPLITS = 32, 56
_SOME_SEGMENTS = 128
_SOME_LONG_SEGMENTS, _LONG_TOKENS = 256, 2048

# What no kernel exceeds that does not split sequences, and how much more than one kernel's need
# another's of the same splits may be (5120 bytes for 4352), for which a smaller batch may ask.
_workspaces = Workspaces(least_bytes=10 << 20, margin=1.2)

# Of an `L2Partition`, whose words the kernel takes: nothing is known.
_NOT_KNOWN = (0,) * L2_WORDS


def variant(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    max_seqlen_q: int,
    batch_invariant: bool,
    out: torch.Tensor,
) -> AttentionDecode | None:
    """Return the kernel that attends to these, None where none does.

    The arguments are those of `paged_attention`, checked.
    """
    heads_q, dim = q.shape[1:]
    pages, page_size, heads_kv = k_cache.shape[:3]
    if (
        pages == 0
        or v_cache.size(3) != dim
        or k_cache.dtype not in (q.dtype, torch.int8, torch.float8_e4m3fn)
        or not _within_limits(page_table, page_size, heads_kv)
        or not has_kernel(AttentionDecode, q)
        or not in_vectors(k_cache, _VECTOR_BYTES)
        or not in_vectors(v_cache, _VECTOR_BYTES)
        or not in_vectors(q, 4)
        or not in_vectors(out, 8)
    ):
        return None
    rows = max_seqlen_q * (heads_q // max(heads_kv, 1))
    if rows > _COLUMNS[-1]:  # prompts, of lengths that `kernel_for` shall not remember
        return None
    return kernel_for(
        q.dtype,
        k_cache.dtype,
        dim,
        rows,
        copy_pages=page_size % _PAGE == 0,
        batch_invariant=batch_invariant,
        load=_load_of(
            min(page_table.size(0), _MOST_SEQUENCES) * heads_kv,
            page_table.size(1) * page_size,
            batch_invariant=batch_invariant,
        ),
    )


@cache
def kernel_for(
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    dim: int,
    rows: int,
    *,
    copy_pages: bool,
    batch_invariant: bool,
    load: DecodeLoad,
) -> AttentionDecode | None:
    """Return the kernel for `rows` queries times heads of a group, None where there is none."""
    if (
        dtype not in (torch.bfloat16, torch.float16)
        or dim % 16
        or not 16 <= dim <= 256
        or not 0 < rows <= _COLUMNS[-1]
        or (dim > 128 and rows > _MOST_ROWS_OF_LONG_HEADS)
    ):
        return None
    columns = next(columns for columns in _COLUMNS if columns >= rows)
    cluster = decode_cluster(
        load,
        head_dim=dim,
        columns=columns,
        copy_pages=copy_pages,
        quantized=kv_dtype != dtype,
        batch_invariant=batch_invariant,
    )
    return AttentionDecode(
        head_dim=dim,
        dtype=KERNEL_NAMES[dtype],
        kv_dtype=KERNEL_NAMES[kv_dtype],
        columns=columns,
        copy_pages=copy_pages,
        split_tokens=SPLIT_TOKENS if batch_invariant else 0,
        cluster=cluster,
    )


def decode_kernels(
    dtype: torch.dtype,
    dim: int,
    group: int,
    *,
    kv_dtype: torch.dtype | None = None,
    batch_invariant: bool = True,
) -> list[AttentionDecode]:
    """Return what a model's steps of one query for each sequence take, whatever a page's size.

    Without fixed splits the ends of prompts take these kernels, too: of up to 64 rows.

    Args:
        dtype: of the queries.
        dim: of a head.
        group: query heads of a KV head.
        kv_dtype: of the cache; None is that of the queries.
        batch_invariant: as of `paged_attention`.
    """
    kv_dtype = dtype if kv_dtype is None else kv_dtype
    rows = [group] if batch_invariant else [group, *(c for c in _COLUMNS if c > group)]
    found = (
        kernel_for(
            *(dtype, kv_dtype, dim, count),
            copy_pages=copied,
            batch_invariant=batch_invariant,
            load=load,
        )
        for count, copied, load in product(rows, (True, False), get_args(DecodeLoad))
    )
    return list(dict.fromkeys(kernel for kernel in found if kernel is not None))


def attend(
    kernel: AttentionDecode,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None,
    max_seqlen_q: int,
    rule: LogitRule,
    sinks: torch.Tensor | None,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    workspace: torch.Tensor | None,
    l2_partition: Sequence[int],
) -> None:
    """Launch the kernel that `variant` chose on torch's current stream.

    The kernel before it on the stream may still be writing any of these.

    Raises:
        ValueError: for a workspace that is too small.
        OutOfMemoryError: torch's, when there is no room for one.
    """
    if seq_lens.size(0) == 0 or q.size(0) == 0:
        return
    device = q.get_device()
    heads_q, heads_kv = q.size(1), k_cache.size(2)
    with on_device(device):
        stream = current_stream(device)
        library = load(kernel, device=device, stream=stream)
        needed = library.workspace_bytes(
            rows=max_seqlen_q * (heads_q // heads_kv),
            sequences=min(seq_lens.size(0), _MOST_SEQUENCES) * heads_kv,
            tokens=page_table.size(1) * k_cache.size(1),
        )
        if workspace is None:
            workspace = _workspaces.get(device, stream, needed)
        else:
            workspace = given(workspace, needed)
        batch = seq_lens.size(0)
        for first in range(0, batch, _MOST_SEQUENCES):
            # Rows of q, unless cu_seqlens_q names them.
            row = 0 if cu_seqlens_q is not None else first * max_seqlen_q
            library.launch(
                q=heads_of(q, row),
                k_cache=slots_of(k_cache),
                v_cache=slots_of(v_cache),
                page_table=address_of_row(page_table, first),
                page_table_stride=page_table.stride(0),
                seq_lens=address_of_row(seq_lens, first),
                cu_seqlens_q=0 if cu_seqlens_q is None else address_of_row(cu_seqlens_q, first),
                sinks=address_of(sinks),
                out=heads_of(out, row),
                lse=heads_of(lse, row),
                workspace=workspace.data_ptr(),
                batch=min(batch - first, _MOST_SEQUENCES),
                heads_q=heads_q,
                heads_kv=heads_kv,
                pages=k_cache.size(0),
                page_size=k_cache.size(1),
                max_pages=page_table.size(1),
                max_seqlen_q=max_seqlen_q,
                scale=rule.scale,
                softcap=rule.softcap,
                left=rule.left,
                right=0 if rule.causal else rule.right,
                k_scale=slots_of(k_scale),
                v_scale=slots_of(v_scale),
                pdl=pdl.enabled(),
                l2_partition=l2_partition or _NOT_KNOWN,
                stream=stream,
            )


def workspace_bytes(
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    group: int,
    heads_kv: int,
    dim: int,
    *,
    max_batch: int,
    max_pages: int,
    page_size: int,
    max_seqlen_q: int,
    batch_invariant: bool,
    device: int,
) -> int:
    """Return the bytes that suffice for all launches within these capacities; 0 without a kernel.

    Kernels that are not compiled yet are compiled. The arguments are those of
    `paged_attention_workspace`, checked; `group` is the number of query heads of a KV head.
    """
    batch = min(max_batch, _MOST_SEQUENCES)
    tokens = max_pages * page_size
    loads = {
        _load_of(size * heads_kv, tokens, batch_invariant=batch_invariant)
        for size in range(1, batch + 1)
    }
    rows = range(group, min(max_seqlen_q * group, _COLUMNS[-1]) + 1, group)
    kernels = {
        kernel_for(
            dtype,
            kv_dtype,
            dim,
            count,
            copy_pages=page_size % _PAGE == 0,
            batch_invariant=batch_invariant,
            load=amount,
        ): count
        for count, amount in product(rows, sorted(loads))
    }
    with on_device(device):
        stream = current_stream(device)
        return max(
            (
                load(kernel, device=device, stream=stream).workspace_bytes(
                    rows=count, sequences=batch * heads_kv, tokens=tokens
                )
                for kernel, count in kernels.items()
                if kernel is not None
            ),
            default=0,
        )


def _load_of(segments: int, tokens: int, *, batch_invariant: bool) -> DecodeLoad:
    """Return how much there may be to do for sequences times KV heads, of up to so many tokens."""
    if batch_invariant:
        splits = segments * -(-tokens // SPLIT_TOKENS)
        few = segments <= _FEW_SPLIT_SEGMENTS and splits <= _FEW_SPLITS
    else:
        few = segments <= _FEW_SEGMENTS and segments * tokens <= _FEW_TOKENS
    if segments > _SOME_SEGMENTS:
        long = tokens > _LONG_TOKENS and segments <= _SOME_LONG_SEGMENTS
        return "some_long" if long else "many"
    return "few" if few else "some"


def _within_limits(page_table: torch.Tensor, page_size: int, heads_kv: int) -> bool:
    """Return whether a launch can count the tokens and tiles that may be in the cache."""
    tokens = page_table.size(1) * page_size
    sequences = min(page_table.size(0), _MOST_SEQUENCES)
    tiles = sequences * heads_kv * (tokens // _TILE_TOKENS + 2)
    return tokens < _MOST_TOKENS and tiles < _MOST_TILES
