"""Prefill attention on a GPU: no delay at a hand-over changes a bit."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch

from ostinato import _C
from ostinato.jit.compiler import build, plan
from ostinato.jit.mode import RELEASE, BuildMode
from ostinato.ops.attention.prefill_variants import AttentionPrefill
from ostinato.ops.common.device import heads_of, slots_of

pytestmark = [pytest.mark.gpu, pytest.mark.nvcc]

_SITES = (
    *("prefill_queries_load", "prefill_tile_load", "prefill_work_tile_publish"),
    *("prefill_work_tile_release", "prefill_release", "prefill_epilogue_store"),
)
_COPIED = ("packed", "pages")
# Items that overlap and those that do not; three warpgroups; copied and gathered pages; outputs
# that leave in two passes (e4m3 of 256).
_VARIANTS = (
    *(AttentionPrefill(head_dim=dim, dtype="bf16") for dim in (64, 128, 256)),
    *(AttentionPrefill(head_dim=128, dtype="bf16", keys=keys) for keys in ("pages", "slots")),
    AttentionPrefill(head_dim=64, dtype="bf16", keys="pages"),
    *(AttentionPrefill(head_dim=128, dtype="bf16", keys=keys, warpgroups=3) for keys in _COPIED),
    *(
        AttentionPrefill(head_dim=128, dtype="e4m3", out_dtype="bf16", warpgroups=warpgroups)
        for warpgroups in (0, 3)
    ),
    AttentionPrefill(head_dim=256, dtype="e4m3", out_dtype="bf16"),
)


def _sites(variant: AttentionPrefill) -> tuple[str, ...]:
    of_values = "prefill_transpose" if variant.dtype == "e4m3" else "prefill_values_clear"
    return (*_SITES, of_values)


_CASES = [(variant, site) for variant in _VARIANTS for site in _sites(variant)]
# The longest is long enough for sums that are put aside.
_LENGTHS = ([2400], [1, 0, 64, 300], [129] * 12)
_PAGES, _PAGE, _HEADS_Q, _HEADS_KV = 150, 16, 4, 2

Launch = Callable[[BuildMode, list[int]], torch.Tensor]


class Inputs(NamedTuple):
    """Of all launches: [tokens, heads, 256], keys and values in pages, and a table of these."""

    q: torch.Tensor
    cache: torch.Tensor
    table: torch.Tensor


@pytest.fixture(scope="module")
def inputs() -> Inputs:
    tokens = max(map(sum, _LENGTHS))
    return Inputs(
        torch.randn(tokens, _HEADS_Q, 256, device="cuda").bfloat16(),
        torch.randn(2, _PAGES * 40, _PAGE, _HEADS_KV, 256, device="cuda").bfloat16(),
        torch.randint(_PAGES * 40, (12, _PAGES), dtype=torch.int32, device="cuda"),
    )


@cache
def _libraries_of(variant: AttentionPrefill) -> dict[BuildMode, _C.Library]:
    modes = [RELEASE, *(_delayed(site) for site in _sites(variant))]
    entries = build([plan(variant, mode) for mode in modes])
    libraries = {m: _C.Library(str(e.library)) for m, e in zip(modes, entries, strict=True)}
    for library in libraries.values():
        library.prepare()
    return libraries


@pytest.fixture
def launch(variant: AttentionPrefill, request: pytest.FixtureRequest) -> Launch:
    """Give a function of mode and lengths that returns out, from the same inputs.

    The builds are asked for before anything needs a GPU, so that `make gpu-kernels` notes them.
    """
    libraries = _libraries_of(variant)
    q_all, kv_cache, table = request.getfixturevalue("inputs")

    def run(mode: BuildMode, lengths: list[int]) -> torch.Tensor:
        dim = variant.head_dim
        q = q_all[: sum(lengths), :, :dim].contiguous()
        out = torch.full_like(q, torch.nan)
        k, v = kv_cache[..., :dim]
        scale = torch.ones((), device="cuda")
        scales: dict[str, Any] = {}
        if variant.dtype == "e4m3":
            q, k, v = (x.to(torch.float8_e4m3fn) for x in (q, k, v))
            scales = {f"{name}_scale": scale.data_ptr() for name in "qkv"}
        offsets = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
        k_lens = torch.tensor(lengths, dtype=torch.int32, device="cuda")
        keys: dict[str, Any] = {
            "seq_lens": k_lens.data_ptr(),
            "page_table": table.data_ptr(),
            "page_table_stride": table.stride(0),
            "pages": k.size(0),
            "page_size": _PAGE,
            "max_pages": table.size(1),
        }
        k_slots, v_slots = slots_of(k), slots_of(v)
        if variant.keys == "packed":
            keys = {
                "cu_seqlens_k": offsets.data_ptr(),
                "tokens_k": k.size(0) * _PAGE,
                "max_seqlen_k": max(lengths),
            }
            k_slots, v_slots = ((x[0], 0, *x[2:]) for x in (k_slots, v_slots))
        library = libraries[mode]
        workspace = torch.zeros(library.workspace_bytes(), dtype=torch.uint8, device="cuda")
        library.launch(
            q=heads_of(q),
            k=k_slots,
            v=v_slots,
            out=heads_of(out),
            batch=len(lengths),
            heads_q=_HEADS_Q,
            left=-1,
            right=0,
            heads_kv=_HEADS_KV,
            tokens_q=q.size(0),
            max_seqlen_q=max(lengths),
            scale=dim**-0.5,
            stream=torch.cuda.current_stream().cuda_stream,
            workspace=workspace.data_ptr(),
            cu_seqlens_q=offsets.data_ptr(),
            pdl=True,
            **keys,
            **scales,
        )
        torch.cuda.synchronize()  # the lengths must live until then
        return out

    return run


def _delayed(site: str) -> BuildMode:
    return BuildMode(delay_site=site)


@pytest.mark.parametrize("lengths", _LENGTHS, ids=lambda lengths: f"{len(lengths)}x{lengths[0]}")
@pytest.mark.parametrize(("variant", "site"), _CASES, ids=lambda x: getattr(x, "name", x))
def test_injected_delays_change_no_bit(launch: Launch, site: str, lengths: list[int]) -> None:
    expected = launch(RELEASE, lengths)
    assert not expected.isnan().any()
    for _ in range(3):
        assert torch.equal(launch(_delayed(site), lengths), expected)
