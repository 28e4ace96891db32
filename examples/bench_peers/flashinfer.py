"""FlashInfer: paged decode, XQA, and prefill over packed or paged keys.

It compiles a module for each head dim, and XQA one for each page size and ratio of heads, when it
is first used, unless they lie in its `data/aot`.
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
from ostinato.bench.prefill.inputs import DTYPE
from ostinato.bench.prefill.inputs import Inputs as PrefillInputs

_PACKAGE = "flashinfer-python"
_WORKSPACE_BYTES = 256 << 20


def peers(section: str, environ: Mapping[str, str]) -> list[Implementation[Any, Any]]:
    """Return the implementations for `bench decode` or `bench prefill`."""
    if section == "decode":
        return [
            Implementation(name, Layout(16), bind, _one_query, flashinfer, _PACKAGE)
            for name, bind in (("fi", _bind_decode), ("xqa", _bind_xqa))
        ]
    if section == "prefill":
        return [
            Implementation(
                f"fi_{backend}",
                DTYPE,
                partial(_bind_prefill, backend=backend),
                prepare=flashinfer,
                package=_PACKAGE,
            )
            for backend in ("fa3", "fa2")
        ]
    return []


@cache
def flashinfer() -> Any:
    """Return FlashInfer's package."""
    return importlib.import_module("flashinfer")


def _one_query(case: DecodeCase) -> str | None:
    return "one query for each sequence" if case.q_len > 1 else None


def _bind_decode(case: DecodeCase, sets: Sequence[DecodeInputs]) -> list[Call]:
    """Bind FlashInfer's decode on tensor cores, planned once for all sets, as for all layers."""
    one = sets[0]
    device, page = one.q.device, one.page
    counts = [-(-length // page) for length in case.lengths]
    offsets = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    last = torch.tensor([(n - 1) % page + 1 for n in case.lengths], dtype=torch.int32)
    ids = torch.cat([one.page_table[row, :count] for row, count in enumerate(counts)])
    wrapper = flashinfer().BatchDecodeWithPagedKVCacheWrapper(
        torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device),
        "NHD",
        use_cuda_graph=True,
        use_tensor_cores=True,
        paged_kv_indptr_buffer=offsets.to(device),
        paged_kv_indices_buffer=ids.clone(),
        paged_kv_last_page_len_buffer=last.to(device),
        backend="fa2",
    )
    heads = (case.heads_q, case.heads_kv, case.dim, page)
    given = (offsets.to(device), ids, last.to(device))
    wrapper.plan(*given, *heads, q_data_type=one.q.dtype, kv_data_type=one.k_cache.dtype)

    def call(s: DecodeInputs) -> torch.Tensor:
        wrapper.run(s.q, (s.k_cache, s.v_cache), out=s.out)
        return s.out

    return [partial(call, s) for s in sets]


def _bind_xqa(case: DecodeCase, sets: Sequence[DecodeInputs]) -> list[Call]:
    device = sets[0].q.device
    workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    semaphores = torch.zeros(1 << 22, dtype=torch.uint8, device=device).view(torch.uint32)

    def call(s: DecodeInputs) -> torch.Tensor:
        by_sequence = (case.batch, 1, case.heads_q, case.dim)
        lengths = s.seq_lens.view(torch.uint32).unsqueeze(1)
        given = (s.q.view(by_sequence), s.k_cache, s.v_cache, s.page_table, lengths)
        scratch = (workspace, semaphores)
        flashinfer().xqa(*given, s.out.view(by_sequence), *scratch, case.heads_kv, s.page)
        return s.out

    return [partial(call, s) for s in sets]


def _bind_prefill(case: PrefillCase, sets: Sequence[PrefillInputs], *, backend: str) -> list[Call]:
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

        def attend(s: PrefillInputs) -> torch.Tensor:
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

    def call(s: PrefillInputs) -> torch.Tensor:
        paged.run(s.q, (s.k, s.v), out=s.out)
        return s.out

    return [partial(call, s) for s in sets]
