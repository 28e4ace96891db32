"""Decode attention on a GPU: no delay at a hand-over, and no late predecessor, changes a bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from ostinato import _C
from ostinato.jit.compiler import build, plan
from ostinato.jit.mode import RELEASE, BuildMode
from ostinato.ops.attention.decode_variants import AttentionDecode
from ostinato.ops.common.device import heads_of, slots_of

pytestmark = [pytest.mark.gpu, pytest.mark.nvcc]

_SITES = (
    *("decode_keys_load", "decode_keys_release", "decode_values_load", "decode_values_release"),
    *("decode_sums_store", "decode_sums_load", "decode_partial_store"),
)
_SITES_OF_CLUSTERS = ("decode_cluster_reduce_store", "decode_cluster_reduce_load")
_SITES_OF_SCHEDULER = ("decode_schedule_store", "decode_schedule_load")
# A warp's own columns, and teams of warps; copied and gathered pages.
_ALONE = tuple(
    AttentionDecode(
        head_dim=128,
        dtype="bf16",
        columns=columns,
        copy_pages=copy_pages,
        split_tokens=split_tokens,
    )
    for columns, split_tokens in ((8, 0), (32, 0), (64, 0), (8, 512))
    for copy_pages in (True, False)
)
# Clusters, that share each tile or its chains of blocks.
_SHARED = tuple(
    AttentionDecode(head_dim=128, dtype="bf16", split_tokens=split_tokens, cluster=cluster)
    for split_tokens, cluster in ((0, 8), (512, 4))
)
_VARIANTS = (*_ALONE, *_SHARED)
_CLAIMING = tuple(variant for variant in _ALONE if variant.columns == 8 and variant.copy_pages)
_DELAYED = tuple(
    (variant, site)
    for variant in _VARIANTS
    for site in (
        *_SITES,
        *(_SITES_OF_CLUSTERS if variant in _SHARED else ()),
        *(_SITES_OF_SCHEDULER if variant in _CLAIMING else ()),
    )
)
# The last ones are enough for segments to be claimed.
_LENGTHS = ([3000], [1, 0, 64, 700], [200] * 40, [200, 270, 0, 300] * 90)
_MOST = max(map(len, _LENGTHS))

# Given the lengths and then the page ids of a launch, before it.
Predecessor = Callable[[torch.Tensor, int], None]
Launch = Callable[..., torch.Tensor]


@pytest.fixture(scope="module")
def launch() -> Launch:
    """Give a function of variant, mode and lengths that returns out, from the same inputs."""
    wanted = [(v, RELEASE) for v in _VARIANTS] + [(v, _delayed(site)) for v, site in _DELAYED]
    entries = build([plan(variant, mode) for variant, mode in wanted])
    libraries = {key: _C.Library(str(e.library)) for key, e in zip(wanted, entries, strict=True)}
    for library in libraries.values():
        library.prepare()
    pages, page, heads_kv, dim, rows = 800, 16, 4, 128, 64
    k_cache, v_cache = (
        torch.randn(pages, page, heads_kv, dim, device="cuda").bfloat16() for _ in "kv"
    )
    q_all = torch.randn(_MOST, heads_kv * rows, dim, device="cuda").bfloat16()
    table = torch.randint(pages, (_MOST, 256), dtype=torch.int32, device="cuda")

    def run(
        variant: AttentionDecode,
        mode: BuildMode,
        lengths: list[int],
        predecessor: Predecessor | None = None,
    ) -> torch.Tensor:
        library, batch = libraries[variant, mode], len(lengths)
        heads_q = heads_kv * variant.columns
        q = q_all[:batch, :heads_q].contiguous()
        out = torch.full_like(q, torch.nan)
        seq_lens = torch.tensor(lengths, dtype=torch.int32, device="cuda")
        numbers = torch.cat([seq_lens, table[:batch].flatten()])
        size = library.workspace_bytes(
            rows=variant.columns, sequences=batch * heads_kv, tokens=table.size(1) * page
        )
        workspace = torch.zeros(size, dtype=torch.uint8, device="cuda")
        if predecessor is not None:
            predecessor(numbers, batch)
        library.launch(
            q=heads_of(q),
            k_cache=slots_of(k_cache),
            v_cache=slots_of(v_cache),
            page_table=numbers[batch:].data_ptr(),
            page_table_stride=table.size(1),
            seq_lens=numbers.data_ptr(),
            out=heads_of(out),
            workspace=workspace.data_ptr(),
            batch=batch,
            heads_q=heads_q,
            heads_kv=heads_kv,
            pages=pages,
            page_size=page,
            max_pages=table.size(1),
            max_seqlen_q=1,
            scale=dim**-0.5,
            left=-1,
            right=0,
            pdl=True,
            stream=torch.cuda.current_stream().cuda_stream,
        )
        return out

    return run


def _delayed(site: str) -> BuildMode:
    return BuildMode(delay_site=site)


@pytest.mark.parametrize("lengths", _LENGTHS, ids=lambda lengths: f"{len(lengths)}x{lengths[0]}")
@pytest.mark.parametrize(
    ("variant", "site"), _DELAYED, ids=lambda x: x if isinstance(x, str) else x.name
)
def test_injected_delays_change_no_bit(
    launch: Launch, variant: AttentionDecode, site: str, lengths: list[int]
) -> None:
    expected = launch(variant, RELEASE, lengths)
    assert not expected.isnan().any()
    for _ in range(3):
        assert torch.equal(launch(variant, _delayed(site), lengths), expected)


@pytest.mark.parametrize("wrong", ["lengths", "page ids", "both", "neither"])
@pytest.mark.parametrize("lengths", _LENGTHS, ids=lambda lengths: f"{len(lengths)}x{lengths[0]}")
@pytest.mark.parametrize("variant", _VARIANTS, ids=lambda v: v.name)
def test_what_a_predecessor_writes_late_is_what_counts(
    launch: Launch,
    write_late: Callable[[torch.Tensor, torch.Tensor], None],
    variant: AttentionDecode,
    lengths: list[int],
    wrong: str,
) -> None:
    def predecessor(numbers: torch.Tensor, batch: int) -> None:
        right = numbers.clone()
        if wrong in ("lengths", "both"):
            numbers[:batch].random_(-(1 << 31), 1 << 31).bitwise_and_(-(1 << 31) | 0xFFF)
        if wrong in ("page ids", "both"):
            numbers[batch:].random_(-(1 << 31), 1 << 31)
        torch.cuda.synchronize()  # or the predecessor's own start would wait for these
        write_late(numbers, right)

    expected = launch(variant, RELEASE, lengths)
    for _ in range(5):
        assert torch.equal(launch(variant, RELEASE, lengths, predecessor), expected)
