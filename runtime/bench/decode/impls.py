"""Who attends: our op, and the paged peers it is compared with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from ... import ops
from ..attention_check import Call
from ..attention_libraries import fa3, flashinfer
from ..comparison import OURS
from .cases import (
    KV_SUFFIXES,
    Case,
)
from .inputs import Inputs

_WORKSPACE_BYTES = 256 << 20


@dataclass(frozen=True)
class Implementation:
    """A way to attend to a paged cache.

    Args:
        name: as the rows call it.
        kv_dtype: of the cache, in `decode_cases.KV_SUFFIXES`.
        page: tokens of a page.
        bind: returns one call per set of inputs, ready to be captured; it may plan on the host
            what will not change. Raises `ValueError` or `RuntimeError` for a case that it does not
            take.
        prepare: makes it ready; raises `ImportError` or `OSError` where it is not installed.
    """

    name: str
    kv_dtype: str
    page: int
    bind: Callable[[Case, Sequence[Inputs]], list[Call]]
    prepare: Callable[[], object] = lambda: None

    @property
    def is_ours(self) -> bool:
        return self.name.startswith(OURS)


def ours(page: int, kv_dtype: str) -> Implementation:
    """Return our op for pages of this size and a cache of this dtype."""
    name = f"{OURS}p{page}{KV_SUFFIXES[kv_dtype]}"
    return Implementation(name, kv_dtype, page, _bind_ours)


def peers(names: Sequence[str], pages: Sequence[int]) -> list[Implementation]:
    """Return the peers of these names, for a bf16 cache in pages of each of these sizes.

    Raises:
        ValueError: for an unknown name.
    """
    for name in names:
        if name not in PEERS:
            raise ValueError(f"got {name!r}, expected all or none or {' or '.join(PEERS)}")
    return [
        Implementation(f"{name}_p{page}", "bf16", page, bind, prepare)
        for name, (bind, prepare) in PEERS.items()
        if name in names
        for page in pages
    ]


def is_rival(name: str) -> bool:
    """Return whether a name, with its page, is of a paged peer."""
    return name.rpartition("_p")[0] in PEERS


def _bind_ours(case: Case, sets: Sequence[Inputs]) -> list[Call]:
    def call(s: Inputs) -> torch.Tensor:
        return ops.paged_attention(
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

    return [partial(call, s) for s in sets]


def _bind_fa3(case: Case, sets: Sequence[Inputs], *, planned: bool) -> list[Call]:
    """Bind FlashAttention-3's op; `planned`: with its tile schedule made on the host before."""
    flash, more = fa3()
    plan = None
    if planned:
        sizes = (case.batch, case.q_len, case.kv, case.heads_q, case.heads_kv, case.dim, case.dim)
        given = (sets[0].q.dtype, sets[0].seq_lens, *(None,) * 5, sets[0].page)
        rule = (0, True, -1, -1, 0, False, 0, None, 0)
        plan = flash.get_scheduler_metadata(*sizes, *given, *rule)

    def call(s: Inputs) -> torch.Tensor:
        by_sequence = (case.batch, case.q_len, case.heads_q, case.dim)
        given = (s.q.view(by_sequence), s.k_cache, s.v_cache, None, None, None)
        lengths = (None, None, None, None, s.seq_lens, None, None, s.page_table)
        unused = (None,) * 8  # left padding, rotary, scales
        rule = (case.dim**-0.5, True, -1, -1, 0, 0.0, True, plan, 0, None, 0)
        flash.fwd(*given, s.out.view(by_sequence), *lengths, *unused, *rule, *more)
        return s.out

    return [partial(call, s) for s in sets]


def _one_query(case: Case) -> None:
    if case.q_len > 1:
        raise ValueError("one query for each sequence")


def _bind_flashinfer(case: Case, sets: Sequence[Inputs]) -> list[Call]:
    """Bind FlashInfer's decode on tensor cores, planned once for all sets, as for all layers."""
    _one_query(case)
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

    def call(s: Inputs) -> torch.Tensor:
        wrapper.run(s.q, (s.k_cache, s.v_cache), out=s.out)
        return s.out

    return [partial(call, s) for s in sets]


def _bind_xqa(case: Case, sets: Sequence[Inputs]) -> list[Call]:
    _one_query(case)
    device = sets[0].q.device
    workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    semaphores = torch.zeros(1 << 22, dtype=torch.uint8, device=device).view(torch.uint32)

    def call(s: Inputs) -> torch.Tensor:
        by_sequence = (case.batch, 1, case.heads_q, case.dim)
        lengths = s.seq_lens.view(torch.uint32).unsqueeze(1)
        given = (s.q.view(by_sequence), s.k_cache, s.v_cache, s.page_table, lengths)
        scratch = (workspace, semaphores)
        flashinfer().xqa(*given, s.out.view(by_sequence), *scratch, case.heads_kv, s.page)
        return s.out

    return [partial(call, s) for s in sets]


# By the names of the published times, to which the page is added: how they are bound and prepared.
PEERS: dict[str, tuple[Callable[[Case, Sequence[Inputs]], list[Call]], Callable[[], object]]] = {
    "fa3": (partial(_bind_fa3, planned=False), fa3),
    "fa3m": (partial(_bind_fa3, planned=True), fa3),
    "fi": (_bind_flashinfer, flashinfer),
    "xqa": (_bind_xqa, flashinfer),
}
