"""Who attends to prompts: our ops, and the peers they are compared with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from ... import ops
from ..attention_check import Call
from ..attention_libraries import fa3, flashinfer
from ..comparison import OURS
from .cases import Case
from .inputs import Inputs

Bind = Callable[[Case, Sequence[Inputs]], list[Call]]
# How they are bound and prepared, by name.
Peers = Mapping[str, tuple[Bind, Callable[[], object]]]
_WORKSPACE_BYTES = 256 << 20
# Of FlashAttention-3 in sglang-kernel. Others do not raise: they end the process.
_SGL_DIMS = (64, 128)
_SGL_FP8_DIMS = (64, 128, 256)


@dataclass(frozen=True)
class Implementation:
    """A way to attend to keys that lie packed or in pages.

    Args:
        name: as the rows call it.
        bind: returns one call per set of inputs, ready to be captured; it may plan on the host
            what will not change. Raises `ValueError` or `RuntimeError` for a case that it does not
            take.
        prepare: makes it ready; raises `ImportError` or `OSError` where it is not installed.
    """

    name: str
    bind: Bind
    prepare: Callable[[], object] = lambda: None

    @property
    def is_ours(self) -> bool:
        return self.name.startswith(OURS)


def ours(dtype: str = "bf16") -> Implementation:
    """Return our ops, of queries and keys of this dtype: bf16 or fp8."""
    return Implementation(OURS + dtype, _bind_ours)


def peers(names: Sequence[str], dtype: str = "bf16") -> list[Implementation]:
    """Return the peers of these names, and of this dtype: bf16 or fp8.

    Raises:
        ValueError: for an unknown name.
    """
    known = peers_of(dtype)
    for name in names:
        if name not in known:
            raise ValueError(f"got {name!r}, expected all or none or {' or '.join(known)}")
    return [Implementation(n, bind, ready) for n, (bind, ready) in known.items() if n in names]


def peers_of(impl: str) -> Peers:
    """Return the peers of a dtype, or of an implementation whose name ends with it."""
    return FP8_PEERS if impl.endswith("fp8") else PEERS


def _bind_ours(case: Case, sets: Sequence[Inputs]) -> list[Call]:
    longest_q, longest_k = max(case.q_lens), max(case.k_lens)
    window = (case.window, -1) if case.window else None

    def call(s: Inputs) -> torch.Tensor:
        if s.table is None:
            packed = (s.q, s.k, s.v, s.cu_seqlens_q, s.cu_seqlens_k, longest_q, longest_k)
            scale = None if s.scales is None else s.scales[0]
            return ops.varlen_attention(
                *packed,
                causal=case.causal,
                window=window,
                q_scale=scale,
                k_scale=scale,
                v_scale=scale,
                out=s.out,
            )
        return ops.paged_attention(
            *(s.q, s.k, s.v, s.table, s.seq_lens),
            cu_seqlens_q=s.cu_seqlens_q,
            max_seqlen_q=longest_q,
            causal=case.causal,
            window=window,
            out=s.out,
        )

    if case.page and sets[0].scales is not None:
        raise ValueError("FP8 keys are packed")
    return [partial(call, s) for s in sets]


def _bind_fa3(
    case: Case, sets: Sequence[Inputs], *, dense: bool = False, pack: bool | None = None
) -> list[Call]:
    """Bind FlashAttention-3's op.

    Args:
        case: what is attended to.
        sets: the inputs.
        dense: sequences as a dimension of their own, without lengths.
        pack: whether heads of a group share tiles; None leaves it to the op.
    """
    flash, more = fa3()
    if case.page and sets[0].scales is not None:
        raise ValueError("FP8 keys are packed")
    if dense and not (case.is_dense and case.is_square):
        raise ValueError("sequences of one length, packed")
    dims = _SGL_DIMS if sets[0].scales is None else _SGL_FP8_DIMS
    if more and case.dim not in dims:
        raise ValueError(f"this library's head dims are {' and '.join(map(str, dims))}")
    # Its split of the keys of few queries; where there are many it only looks for it.
    splits = 1 if case.is_square else 0
    left = case.window or -1
    right = 0 if case.causal else -1
    longest_q, longest_k = max(case.q_lens), max(case.k_lens)

    def call(s: Inputs) -> torch.Tensor:
        q, k, v, out = s.q, s.k, s.v, s.out
        lengths: tuple[Any, ...] = (None,) * 8
        if dense:
            q, k, v, out = (x.unflatten(0, (case.batch, -1)) for x in (q, k, v, out))
        elif s.table is None:
            lengths = (s.cu_seqlens_q, s.cu_seqlens_k, None, None, None, longest_q, longest_k, None)
        else:
            lengths = (s.cu_seqlens_q, None, None, None, s.seq_lens, longest_q, None, s.table)
        unused = (None,) * 5 + (s.scales,) * 3  # left padding, rotary; scales
        rule = (case.dim**-0.5, case.causal, left, right, 0, 0.0, True, None, splits, pack, 0)
        flash.fwd(q, k, v, None, None, None, out, *lengths, *unused, *rule, *more)
        return s.out

    return [partial(call, s) for s in sets]


def _bind_flashinfer(case: Case, sets: Sequence[Inputs], *, backend: str) -> list[Call]:
    """Bind FlashInfer's prefill, planned once for all sets, as for all layers."""
    one = sets[0]
    workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=one.q.device)
    options: dict[str, Any] = {
        "causal": case.causal,
        "window_left": case.window or -1,
        "q_data_type": one.q.dtype,
        "kv_data_type": one.k.dtype,
    }
    heads = (case.heads_q, case.heads_kv, case.dim)
    if one.table is None:
        ragged = flashinfer().BatchPrefillWithRaggedKVCacheWrapper(
            workspace, "NHD", backend=backend
        )
        ragged.plan(one.cu_seqlens_q, one.cu_seqlens_k, *heads, **options)

        def attend(s: Inputs) -> torch.Tensor:
            ragged.run(s.q, s.k, s.v, out=s.out)
            return s.out

        return [partial(attend, s) for s in sets]
    counts = [-(-length // case.page) for length in case.k_lens]
    offsets = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    last = torch.tensor([(n - 1) % case.page + 1 for n in case.k_lens], dtype=torch.int32)
    ids = torch.cat([one.table[row, :count] for row, count in enumerate(counts)])
    pages = (offsets.to(ids.device), ids, last.to(ids.device))
    paged = flashinfer().BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend=backend)
    paged.plan(one.cu_seqlens_q, *pages, *heads, case.page, **options)

    def call(s: Inputs) -> torch.Tensor:
        paged.run(s.q, (s.k, s.v), out=s.out)
        return s.out

    return [partial(call, s) for s in sets]


def _bind_sdpa(case: Case, sets: Sequence[Inputs], *, backend: SDPBackend) -> list[Call]:
    """Bind torch's operator, which knows sequences of one length and a mask from the first key."""
    if not case.is_dense or case.window or not (case.is_square or not case.causal):
        raise ValueError("sequences of one length, packed, and no window")

    def call(s: Inputs) -> torch.Tensor:
        q, k, v = (x.unflatten(0, (case.batch, -1)).transpose(1, 2) for x in (s.q, s.k, s.v))
        grouped = case.heads_q != case.heads_kv
        with sdpa_kernel([backend]):
            out = scaled_dot_product_attention(q, k, v, is_causal=case.causal, enable_gqa=grouped)
        return out.transpose(1, 2)

    return [partial(call, s) for s in sets]


# By the names of the published times.
PEERS: Peers = {
    "fa3": (_bind_fa3, fa3),
    "fa3_nopack": (partial(_bind_fa3, pack=False), fa3),
    "fa3_dense": (partial(_bind_fa3, dense=True), fa3),
    "cudnn": (partial(_bind_sdpa, backend=SDPBackend.CUDNN_ATTENTION), lambda: None),
    "fa2": (partial(_bind_sdpa, backend=SDPBackend.FLASH_ATTENTION), lambda: None),
    "fi_fa3": (partial(_bind_flashinfer, backend="fa3"), flashinfer),
    "fi_fa2": (partial(_bind_flashinfer, backend="fa2"), flashinfer),
}
FP8_PEERS: Peers = {"fa3_fp8": (_bind_fa3, fa3)}
