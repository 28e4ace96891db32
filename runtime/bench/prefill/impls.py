"""Implementations of prefill attention: our ops, and torch's operator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from ... import ops
from ..harness.benchmark import Implementation, each
from ..harness.kv_cache import KVLayout
from ..harness.rotation import Call
from ..harness.summary import OURS
from ..shapes import KV_SCALES, KV_SUFFIXES
from .cases import Case
from .inputs import DTYPE, FP8, Inputs

DTYPES = {"bf16": DTYPE, "fp8": FP8}  # as the command line and the rows call them


def ours(dtype: str = "bf16") -> Implementation[Case, Inputs]:
    """Return our ops, for queries and keys of a dtype in `DTYPES`."""
    return Implementation(OURS + dtype, DTYPES[dtype], _bind_ours)


def ours_over(kv_dtype: str, scales: str) -> Implementation[Case, Inputs]:
    """Return our op for bf16 queries over pages of this dtype, with scales of this kind."""
    if kv_dtype == "bf16":
        return ours()
    name = f"{OURS}bf16{KV_SUFFIXES[kv_dtype]}{KV_SCALES[scales]}"
    return Implementation(name, KVLayout(kv_dtype, scales), _bind_ours)


def _bind_ours(case: Case, sets: Sequence[Inputs]) -> Sequence[Call]:
    longest_q, longest_k = max(case.q_lens), max(case.k_lens)
    window = (case.window, -1) if case.window else None

    def call(s: Inputs) -> Tensor:
        out = attend(s)
        assert isinstance(out, Tensor), "return_lse is not asked for"
        return out

    def attend(s: Inputs) -> Tensor | tuple[Tensor, Tensor]:
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
            k_scale=s.k_scale,
            v_scale=s.v_scale,
            out=s.out,
        )

    if case.page and sets[0].scales is not None:
        raise ValueError("FP8 keys are packed")
    return each(call)(case, sets)


def _bind_sdpa(case: Case, sets: Sequence[Inputs], *, backend: SDPBackend) -> Sequence[Call]:
    """Bind torch's operator, which knows sequences of one length and a mask from the first key."""
    if not case.is_dense or case.window or not (case.is_square or not case.causal):
        raise ValueError("sequences of one length, packed, and no window")

    def call(s: Inputs) -> Tensor:
        q, k, v = (x.unflatten(0, (case.batch, -1)).transpose(1, 2) for x in (s.q, s.k, s.v))
        grouped = case.heads_q != case.heads_kv
        with sdpa_kernel([backend]):
            out = scaled_dot_product_attention(q, k, v, is_causal=case.causal, enable_gqa=grouped)
        return out.transpose(1, 2)

    return each(call)(case, sets)


# In the order in which they are timed: torch's operators, and the adapters of others.
PEERS: Mapping[str, Implementation[Case, Inputs] | str] = {
    "fa3": "flash_attn_3.py",
    "fa3_nopack": "flash_attn_3.py",
    "fa3_dense": "flash_attn_3.py",
    "cudnn": Implementation(
        "cudnn", DTYPE, partial(_bind_sdpa, backend=SDPBackend.CUDNN_ATTENTION)
    ),
    "fa2": Implementation("fa2", DTYPE, partial(_bind_sdpa, backend=SDPBackend.FLASH_ATTENTION)),
    "fi_fa3": "flashinfer.py",
    "fi_fa2": "flashinfer.py",
}
FP8_PEERS: Mapping[str, Implementation[Case, Inputs] | str] = {"fa3_fp8": "flash_attn_3.py"}
