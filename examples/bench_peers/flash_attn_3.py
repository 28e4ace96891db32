"""FlashAttention-3, by its own package or by sglang-kernel's build of it.

With OSTINATO_SGL_FLASH_LIBRARY the ops are those of that file, `sgl_kernel/flash_ops.abi3.so` of
sglang-kernel's wheel; else those of the package `flash_attn_interface`.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch

from ostinato.bench.decode.cases import Case as DecodeCase
from ostinato.bench.decode.inputs import Inputs as DecodeInputs
from ostinato.bench.decode.inputs import Layout
from ostinato.bench.harness.benchmark import Implementation
from ostinato.bench.harness.rotation import Call
from ostinato.bench.prefill.cases import Case as PrefillCase
from ostinato.bench.prefill.inputs import DTYPE, FP8
from ostinato.bench.prefill.inputs import Inputs as PrefillInputs

SGL_FLASH_LIBRARY = "OSTINATO_SGL_FLASH_LIBRARY"
# Head dims of sglang-kernel's build. Others do not raise: they end the process.
_SGL_DIMS = (64, 128)
_SGL_FP8_DIMS = (64, 128, 256)


def peers(section: str, environ: Mapping[str, str]) -> list[Implementation[Any, Any]]:
    """Return the implementations for `bench decode` or `bench prefill`."""
    library = environ.get(SGL_FLASH_LIBRARY)

    def implementation(name: str, layout: object, bind: Any) -> Implementation[Any, Any]:
        return Implementation(
            name,
            layout,
            partial(bind, library=library),
            prepare=partial(fa3, library),
            package="flash-attn-3" if library is None else None,
        )

    if section == "decode":
        return [
            implementation("fa3", Layout(16), partial(_bind_decode, planned=False)),
            implementation("fa3m", Layout(16), partial(_bind_decode, planned=True)),
        ]
    if section == "prefill":
        return [
            implementation("fa3", DTYPE, _bind_prefill),
            implementation("fa3_nopack", DTYPE, partial(_bind_prefill, pack=False)),
            implementation("fa3_dense", DTYPE, partial(_bind_prefill, dense=True)),
            implementation("fa3_fp8", FP8, _bind_prefill),
        ]
    return []


@cache
def fa3(library: str | None) -> tuple[Any, tuple[None, ...]]:
    """Return the ops, and what `fwd` takes after the arguments of its own package.

    Args:
        library: file of sglang-kernel's ops; None for the package.
    """
    if library is None:
        importlib.import_module("flash_attn_interface")
        return torch.ops.flash_attn_3, ()
    torch.ops.load_library(library)
    return torch.ops.sgl_kernel, (None,)  # attention sinks


def _bind_decode(
    case: DecodeCase, sets: Sequence[DecodeInputs], *, planned: bool, library: str | None
) -> list[Call]:
    """Bind FlashAttention-3's op; `planned`: with its tile schedule made on the host before."""
    flash, more = fa3(library)
    plan = None
    if planned:
        sizes = (case.batch, case.q_len, case.kv, case.heads_q, case.heads_kv, case.dim, case.dim)
        given = (sets[0].q.dtype, sets[0].seq_lens, *(None,) * 5, sets[0].page)
        rule = (0, True, -1, -1, 0, False, 0, None, 0)
        plan = flash.get_scheduler_metadata(*sizes, *given, *rule)

    def call(s: DecodeInputs) -> torch.Tensor:
        by_sequence = (case.batch, case.q_len, case.heads_q, case.dim)
        given = (s.q.view(by_sequence), s.k_cache, s.v_cache, None, None, None)
        lengths = (None, None, None, None, s.seq_lens, None, None, s.page_table)
        unused = (None,) * 8  # left padding, rotary, scales
        rule = (case.dim**-0.5, True, -1, -1, 0, 0.0, True, plan, 0, None, 0)
        flash.fwd(*given, s.out.view(by_sequence), *lengths, *unused, *rule, *more)
        return s.out

    return [partial(call, s) for s in sets]


def _bind_prefill(
    case: PrefillCase,
    sets: Sequence[PrefillInputs],
    *,
    library: str | None,
    dense: bool = False,
    pack: bool | None = None,
) -> list[Call]:
    """Bind FlashAttention-3's op.

    Args:
        case: what is attended to.
        sets: the inputs.
        library: file of sglang-kernel's ops; None for the package.
        dense: sequences as a dimension of their own, without lengths.
        pack: whether heads of a group share tiles; None leaves it to the op.
    """
    flash, more = fa3(library)
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

    def call(s: PrefillInputs) -> torch.Tensor:
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
