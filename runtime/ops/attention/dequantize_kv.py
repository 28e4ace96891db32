"""Prompts over 8-bit keys and values on CUDA: these are dequantised, then attended to in 16 bits.

Each is read once and becomes a 16-bit operand; the kernel that multiplies would convert it for
every tile of queries (docs/notebooks/prefill_kv8.md). What a call dequantises is in its workspace,
one sequence after the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch

from ...jit.loader import load
from ...jit.registry import register_family
from ...jit.sources import CSRC
from ...jit.targets import HOPPER
from ...jit.variant import OPERAND_DTYPES, Variant, check
from ..common import pdl
from ..common.checks import QUANTIZED_DTYPES
from ..common.device import (
    KERNEL_NAMES,
    address_of,
    address_of_row,
    current_stream,
    in_vectors,
    on_device,
    slots_of,
)
from ..common.sizes import round_up
from ..common.workspace import Workspaces, given
from . import prefill_cuda
from .prefill_variants import AttentionPrefill
from .softmax_torch import LogitRule

_16_BIT = {"bf16": "__nv_bfloat16", "fp16": "__half"}
_8_BIT = {"int8": "int8_t", "e4m3": "__nv_fp8_e4m3"}
_VECTOR = 16  # elements that a thread converts
_ALIGNMENT = 256  # bytes, of what is in the workspace
_OFFSETS_BYTES = 4096  # of a launch's sequences

_workspaces = Workspaces()


@dataclass(frozen=True, kw_only=True)
class DequantizeKV(Variant):
    """Dequantises 8-bit keys and values, in pages or packed, for prefill attention.

    Args:
        dtype: of what they become: bf16 or fp16.
        kv_dtype: of keys and values: int8 or e4m3.
    """

    family: ClassVar[str] = "dequantize_kv"
    source: ClassVar[Path] = CSRC / "attention" / "dequantize" / "dequantize_kv.cu"
    needs: ClassVar[frozenset[str]] = frozenset({HOPPER})

    dtype: str
    kv_dtype: str

    def __post_init__(self) -> None:
        check("dtype", self.dtype, tuple(_16_BIT))
        check("kv_dtype", self.kv_dtype, OPERAND_DTYPES)

    @property
    def name(self) -> str:
        return f"{self.family}-{self.dtype}-{self.kv_dtype}"

    def defines(self) -> dict[str, str]:
        return {"OSTINATO_TYPE": _16_BIT[self.dtype], "OSTINATO_CACHE": _8_BIT[self.kv_dtype]}


register_family(
    DequantizeKV,
    [DequantizeKV(dtype=dtype, kv_dtype=kv) for dtype, kv in product(_16_BIT, OPERAND_DTYPES)],
)


class QuantizedKV(NamedTuple):
    """8-bit keys and values, [..., heads_kv, dim], and their fp32 factors.

    A factor is a scalar, [heads_kv], or one of each token and head.
    """

    k: torch.Tensor
    v: torch.Tensor
    k_scale: torch.Tensor
    v_scale: torch.Tensor


def variant(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    batch: int,
    max_seqlen_q: int,
    *,
    tokens: int,
    batch_invariant: bool = False,
) -> AttentionPrefill | None:
    """Return the kernel that attends to what the keys and values become, None where none does.

    Args:
        q: queries of `paged_attention` or `varlen_attention`, checked like all others.
        k: keys, in pages or packed.
        v: their values.
        out: the op's output.
        batch: how many sequences there are.
        max_seqlen_q: the most queries that one of them has.
        tokens: that are dequantised, at most.
        batch_invariant: as of `paged_attention`.
    """
    if (
        k.dtype not in QUANTIZED_DTYPES
        or q.dtype not in (torch.bfloat16, torch.float16)
        or tokens >= prefill_cuda.MOST_TOKENS
        or not prefill_cuda.serves(q, k, v, out)
        or not all(in_vectors(x, _VECTOR) for x in (k, v))
        or k.size(0) == 0
    ):
        return None
    return prefill_cuda.kernel_of_packed(q, v.size(-1), batch, max_seqlen_q, batch_invariant)


def prompt_kernels(
    dtype: torch.dtype, dim: int, kv_dtype: torch.dtype, *, batch_invariant: bool
) -> list[Variant]:
    """Return what a model's prompts take, whatever a page's size and however many there are.

    The arguments are those of `prefill_kernels`; `kv_dtype` is that of the cache.
    """
    quantized = kv_dtype != dtype
    attends = prefill_cuda.prefill_kernels(
        dtype, dim, quantized=quantized, batch_invariant=batch_invariant
    )
    if not quantized or not attends:
        return [*attends]
    return [DequantizeKV(dtype=KERNEL_NAMES[dtype], kv_dtype=KERNEL_NAMES[kv_dtype]), *attends]


def dequantized_bytes(tokens: int, heads: int, dim: int, value_dim: int) -> int:
    """Return the bytes that keys and values of so many tokens become, with all that is beside."""
    sizes = (2 * tokens * heads * width for width in (dim, value_dim))
    return _OFFSETS_BYTES + sum(round_up(size, _ALIGNMENT) for size in sizes) + _ALIGNMENT


def attend_paged(
    kernel: AttentionPrefill,
    q: torch.Tensor,
    kv: QuantizedKV,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None,
    max_seqlen_q: int,
    tokens: int,
    rule: LogitRule,
    sinks: torch.Tensor | None,
    batch_invariant: bool,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    workspace: torch.Tensor | None,
) -> None:
    """Dequantise the pages, and launch the kernel that `variant` chose, on torch's current stream.

    The arguments are those of `paged_attention`, checked; `tokens` are those that all sequences
    have at most. The kernel before it on the stream may still be writing any of these.

    Raises:
        ValueError: for a workspace that is too small.
        OutOfMemoryError: torch's, when there is no room for one.
    """
    place = _place(kernel, q.dtype, kv, tokens, workspace)
    batch = seq_lens.size(0)
    for first in range(0, batch, prefill_cuda.MOST_SEQUENCES):
        count = min(batch - first, prefill_cuda.MOST_SEQUENCES)
        rows, offsets = cu_seqlens_q, place.offsets[: count + 1]
        if rows is not None:
            rows = rows[first : first + count + 1]
        _dequantize(
            kv,
            place,
            k=slots_of(kv.k),
            v=slots_of(kv.v),
            k_scale=slots_of(kv.k_scale),
            v_scale=slots_of(kv.v_scale),
            page_table=address_of_row(page_table, first),
            page_table_stride=page_table.stride(0),
            seq_lens=address_of_row(seq_lens, first),
            cu_seqlens_q=address_of(rows),
            cu_seqlens_k=offsets.data_ptr(),
            batch=count,
            page_size=kv.k.size(1),
            max_pages=page_table.size(1),
            max_seqlen_q=max_seqlen_q,
            left=rule.left,
        )
        # The first row, unless cu_seqlens_q names them.
        row = 0 if rows is not None else first * max_seqlen_q
        prefill_cuda.attend_packed(
            kernel,
            q[row:],
            place.k,
            place.v,
            rows,
            offsets,
            max_seqlen_q,
            page_table.size(1) * kv.k.size(1),
            rule,
            sinks,
            out[row:],
            None if lse is None else lse[row:],
            place.workspace,
            batch_invariant=batch_invariant,
        )


def attend_packed(
    kernel: AttentionPrefill,
    q: torch.Tensor,
    kv: QuantizedKV,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    rule: LogitRule,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    workspace: torch.Tensor | None,
) -> None:
    """Dequantise packed keys and values, and attend to them; else as `attend_paged`."""
    place = _place(kernel, q.dtype, kv, kv.k.size(0), workspace)
    _dequantize(
        kv,
        place,
        k=prefill_cuda.packed_slots(kv.k),
        v=prefill_cuda.packed_slots(kv.v),
        k_scale=_packed_scales(kv.k_scale),
        v_scale=_packed_scales(kv.v_scale),
    )
    prefill_cuda.attend_packed(
        *(kernel, q, place.k, place.v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k),
        *(rule, sinks, out, lse, place.workspace),
    )


class _Place(NamedTuple):
    """What a call works on: its workspace, and tensors in it.

    `offsets` are int32, where sequences begin in `k` and `v` [tokens, heads, dim].
    """

    workspace: torch.Tensor
    offsets: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


def _place(
    kernel: AttentionPrefill,
    dtype: torch.dtype,
    kv: QuantizedKV,
    tokens: int,
    workspace: torch.Tensor | None,
) -> _Place:
    """Return where so many tokens are dequantised, behind what attention keeps for itself."""
    device = kv.k.get_device()
    heads, dim, value_dim = kv.k.size(-2), kv.k.size(-1), kv.v.size(-1)
    behind = dequantized_bytes(tokens, heads, dim, value_dim)
    needed = prefill_cuda.workspace_bytes([kernel], device) + behind
    if workspace is None:
        with on_device(device):
            workspace = _workspaces.get(device, current_stream(device), needed)
    else:
        workspace = given(workspace, needed)
    # At the end: other kernels that share the workspace keep their counters at its beginning.
    at = workspace.numel() - behind
    at += -(workspace.data_ptr() + at) % _ALIGNMENT
    views: list[torch.Tensor] = []
    for width in (dim, value_dim):
        size = 2 * tokens * heads * width
        first = at + _OFFSETS_BYTES + sum(round_up(2 * x.numel(), _ALIGNMENT) for x in views)
        views.append(workspace[first : first + size].view(dtype).view(tokens, heads, width))
    offsets = workspace[at : at + _OFFSETS_BYTES].view(torch.int32)
    return _Place(workspace, offsets, *views)


def _dequantize(kv: QuantizedKV, place: _Place, **lie: Any) -> None:
    """Launch the kernel; the other arguments are those that say where the tokens lie."""
    device = kv.k.get_device()
    tokens, heads, dim = place.k.shape
    own = DequantizeKV(dtype=KERNEL_NAMES[place.k.dtype], kv_dtype=KERNEL_NAMES[kv.k.dtype])
    with on_device(device):
        stream = current_stream(device)
        load(own, device=device, stream=stream).launch(
            k_out=place.k.data_ptr(),
            v_out=place.v.data_ptr(),
            tokens=tokens,
            heads=heads,
            dim=dim,
            value_dim=place.v.size(2),
            pdl=pdl.enabled(),
            stream=stream,
            **lie,
        )


def _packed_scales(scale: torch.Tensor) -> tuple[int, int, int, int]:
    """Return the address and strides of the scales of packed keys: there are no pages."""
    if scale.ndim == 2:
        return (scale.data_ptr(), 0, scale.stride(0), scale.stride(1))
    return slots_of(scale)
