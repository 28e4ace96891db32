"""Implementations of decode attention: our op, and how a paged peer is timed for a page size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from ... import ops
from ..harness.benchmark import Implementation, each
from ..harness.kv_cache import KVLayout
from ..harness.rotation import Call
from ..harness.summary import OURS
from ..shapes import KV_SCALES, KV_SUFFIXES
from .cases import Case
from .inputs import Inputs, Layout


def ours(page: int, kv_dtype: str, scales: str = "static") -> Implementation[Case, Inputs]:
    """Return our op for pages of this size and a cache of this dtype, with scales of 8 bits."""
    suffix = KV_SUFFIXES[kv_dtype]
    if suffix:
        suffix += KV_SCALES[scales]
    layout = Layout(page, KVLayout(kv_dtype, scales if suffix else "static"))
    return Implementation(f"{OURS}p{page}{suffix}", layout, _bind_ours)


def paged(
    peer: Implementation[Case, Inputs], pages: Sequence[int]
) -> list[Implementation[Case, Inputs]]:
    """Return a peer once for each size of a page, its name followed by `_p` and the size."""
    return [
        replace(peer, name=f"{peer.name}_p{page}", layout=replace(peer.layout, page=page))
        for page in pages
    ]


def _bind_ours(case: Case, sets: Sequence[Inputs]) -> Sequence[Call]:
    def call(s: Inputs) -> torch.Tensor:
        out = ops.paged_attention(
            s.q,
            s.k_cache,
            s.v_cache,
            s.page_table,
            s.seq_lens,
            max_seqlen_q=case.q_len,
            k_scale=s.k_scale,
            v_scale=s.v_scale,
            out=s.out,
        )
        assert isinstance(out, torch.Tensor), "return_lse is not asked for"
        return out

    return each(call)(case, sets)
