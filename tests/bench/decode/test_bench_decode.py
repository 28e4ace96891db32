"""Decode results are checked before they are timed, and a case has a row for every right one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from bench_adapters import ADAPTERS

from ostinato.bench.decode.benchmark import BENCHMARK, is_rival, num_bytes
from ostinato.bench.decode.cases import Case
from ostinato.bench.decode.impls import ours, paged
from ostinato.bench.decode.inputs import Inputs, Layout, expected, random_inputs
from ostinato.bench.harness.benchmark import Implementation
from ostinato.bench.harness.kv_cache import KV_DTYPES, KVLayout
from ostinato.bench.harness.peers import adapter_folder, find_peers, select
from ostinato.bench.harness.rotation import Call
from ostinato.bench.harness.runner import time_cases
from ostinato.bench.harness.summary import Cell, compare

CPU = torch.device("cpu")
CASE = Case(4, 2, 3, 50, 2, 16)


def peers(names: Sequence[str], pages: Sequence[int], **environ: str) -> list[Implementation]:
    folder = adapter_folder(ADAPTERS, {})
    found = find_peers(BENCHMARK, folder, environ, lambda peer: paged(peer, pages))
    return select(names, found)


def difference(got: torch.Tensor, inputs: Inputs, case: Case) -> str | None:
    return BENCHMARK.check.wrong(got, case, inputs)


def attend(one: Inputs, case: Case) -> torch.Tensor:
    [call] = ours(one.page, "bf16").bind(case, [one])
    return call().clone()


def changed(by: Callable[[torch.Tensor], torch.Tensor]) -> Implementation:
    """Return a peer whose results are ours, changed."""

    def bind(case: Case, sets: Sequence[Inputs]) -> list[Call]:
        return [lambda s=s: by(attend(s, case)) for s in sets]

    return Implementation("fa3_p16", Layout(16), bind)


@pytest.mark.parametrize(
    "kv",
    [KVLayout(dtype, scales) for dtype in KV_DTYPES for scales in ("static", "token")],
    ids=str,
)
@pytest.mark.parametrize("page", [1, 7, 16, 64])
@pytest.mark.parametrize("case", [CASE, Case(6, 1, 2, 160, 1, 8, True)], ids=str)
def test_the_reference_is_that_of_the_op(case: Case, page: int, kv: KVLayout) -> None:
    one = random_inputs(case, Layout(page, kv), CPU)[0]
    if kv.dtype != "bf16":
        assert one.k_scale is not None
        assert one.k_scale.ndim == (3 if kv.scales == "token" else 0)
    assert one.page == page
    assert one.seq_lens.tolist() == case.lengths
    got = attend(one, case)
    assert difference(got, one, case) is None
    assert expected(one, 0, case.q_len).shape == (case.q_len, case.heads_q, case.dim)
    got[-1] += 1
    assert "sequence" in str(difference(got, one, case))


def test_sets_share_their_pages_and_nothing_else() -> None:
    first, second = random_inputs(CASE, Layout(16), CPU)
    assert first.page_table is second.page_table
    assert first.seq_lens is second.seq_lens
    assert sorted(first.page_table.flatten().tolist()) == list(range(len(first.k_cache)))
    for mine, other in ((first.k_cache, second.k_cache), (first.q, second.q)):
        assert not torch.equal(mine, other)


def test_nan_and_another_shape_are_wrong() -> None:
    one = random_inputs(CASE, Layout(16), CPU)[0]
    got = attend(one, CASE)
    assert "expected [6, 4, 16]" in str(difference(got[:2], one, CASE))
    got[0, 0, 0] = torch.nan
    assert "sequence 0 is off by nan" in str(difference(got, one, CASE))


def test_every_right_result_has_a_row_and_the_others_a_reason() -> None:
    def refuse(case: Case, sets: Sequence[Inputs]) -> list[Call]:
        raise ValueError("one query for each sequence\nand more")

    impls = [
        ours(16, "bf16"),
        ours(5, "int8"),
        ours(5, "fp8", "token"),
        ours(16, "bf16", "token"),
        changed(lambda out: out),
        Implementation("xqa_p16", Layout(16), refuse),
    ]
    [result] = time_cases(BENCHMARK, [CASE], impls, CPU)
    assert sorted({row.impl for row in result.rows}) == [
        *("fa3_p16", "ostinato_p16", "ostinato_p5_fp8kv_token", "ostinato_p5_int8kv"),
    ]
    assert {(row.section, row.case) for row in result.rows} == {("decode", "4/2 b3 kv50 q2 d16")}
    assert all(row.us > 0 for row in result.rows)
    assert result.unsupported == {"xqa_p16": "one query for each sequence"}
    assert result.failures == {}


def test_a_wrong_result_is_a_failure() -> None:
    [result] = time_cases(BENCHMARK, [CASE], [changed(lambda out: out * 1.1)], CPU)
    assert result.rows == []
    assert result.failures["fa3_p16"].startswith("wrong result: sequence 0 is off by 0.1")


def test_bytes_are_counted_once() -> None:
    kv = 2 * 3 * 50 * 2 * 16
    rows = 2 * 2 * (3 * 2 * 4 * 16)
    assert num_bytes(CASE, Layout(16)) == 2 * kv + rows
    assert num_bytes(CASE, Layout(16, KVLayout("fp8"))) == kv + rows
    assert num_bytes(CASE, Layout(16, KVLayout("bf16", "token"))) == 2 * kv + rows
    scales = 2 * 3 * 50 * 2 * 4
    assert num_bytes(CASE, Layout(16, KVLayout("int8", "token"))) == kv + scales + rows


def test_names_of_peers_and_pages() -> None:
    assert [p.name for p in peers(["fi", "fa3"], [16, 64])] == [
        *("fa3_p16", "fa3_p64", "fi_p16", "fi_p64"),
    ]
    assert all(is_rival("ostinato_p16", f"{name}_p16") for name in BENCHMARK.peers)
    assert not is_rival("ostinato_p16", "sdpa_fa2")
    assert not is_rival("ostinato_p16", "ostinato_p16")
    assert is_rival("ostinato_p16_fp8kv_token", "ostinato_p16")
    assert not is_rival("ostinato_p16_fp8kv_token", "ostinato_p64")
    with pytest.raises(ValueError, match="got 'fa2', expected all or none or fa3"):
        peers(["fa2"], [16])


def test_fa3_of_sglang_kernel_is_asked_for_by_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[str] = []
    monkeypatch.setattr(torch.ops, "load_library", loaded.append)
    library = str(tmp_path / "flash_ops.abi3.so")
    for peer in peers(["fa3", "fa3m"], [16, 64], OSTINATO_SGL_FLASH_LIBRARY=library):
        peer.prepare()
    assert loaded == [library]


def test_a_missing_library_of_sglang_kernel(tmp_path: Path) -> None:
    library = str(tmp_path / "missing.so")
    [peer] = peers(["fa3"], [16], OSTINATO_SGL_FLASH_LIBRARY=library)
    with pytest.raises(OSError, match=r"missing\.so"):
        peer.prepare()


def test_flashinfer_takes_one_query_for_each_sequence() -> None:
    for peer in peers(["fi", "xqa"], [16]):
        assert peer.refuses(CASE) == "one query for each sequence"
        assert peer.refuses(Case(4, 2, 3, 50, 1, 16)) is None


def test_the_best_paged_peer_of_any_page_counts() -> None:
    case, large = Case(32, 8, 1, 512), Case(32, 8, 128, 8192)
    measured = {
        case: {"ostinato_p16": 6.0, "fa3_p16": 9.0, "xqa_p64": 8.0, "sdpa_cud": 1.0},
        large: {"ostinato_p16": 900.0, "fi_p16": 1000.0},
    }
    assert compare("ostinato_p16", measured, measured, partial(is_rival, "ostinato_p16")) == [
        Cell(case, 6.0, "xqa_p64", 8.0),
        Cell(large, 900.0, "fi_p16", 1000.0),
    ]
    text = "\n".join(BENCHMARK.summary.lines(measured, measured))
    assert "  all: ×0.822, at most ×0.900, 2 cases" in text
    assert "  KV below 64 MB: ×0.750, at most ×0.750, 1 cases" in text
    assert "  KV above 512 MB: ×0.900, at most ×0.900, 1 cases" in text
    assert "  worst: 32/8 b128 kv8192 ×0.900 of fi_p16" in text
