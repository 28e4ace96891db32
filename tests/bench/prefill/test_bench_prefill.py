"""Prefill: cases and their work, results that are checked before they are timed, the summary."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from bench_adapters import ADAPTERS
from hypothesis import given
from hypothesis import strategies as st

from ostinato.bench.harness.benchmark import Implementation
from ostinato.bench.harness.kv_cache import KV_DTYPES, KVLayout
from ostinato.bench.harness.peers import adapter_folder, adapter_named, find_peers, select
from ostinato.bench.harness.rotation import Call
from ostinato.bench.harness.runner import time_cases
from ostinato.bench.harness.summary import Cell, compare
from ostinato.bench.prefill.benchmark import BENCHMARKS, is_rival, num_bytes
from ostinato.bench.prefill.cases import DEFAULT_CASES, FP8_CASES, Case
from ostinato.bench.prefill.impls import DTYPES, ours, ours_over
from ostinato.bench.prefill.inputs import DTYPE, FP8, Inputs, checked_rows, expected, random_inputs

FLASH_ATTN_3 = adapter_named("flash_attn_3.py", adapter_folder(ADAPTERS, {}))
CPU = torch.device("cpu")
CASE = Case(2, 70, 0, 4, 2, 16)
CASES = [
    CASE,
    Case(3, 9, 40, 6, 1, 16),
    Case(2, 33, 0, 4, 2, 16, causal=False),
    Case(2, 150, 0, 2, 2, 16, window=20),
    Case(2, 40, 0, 4, 2, 16, page=16),
    Case(3, 64, 0, 4, 2, 16, page=5, skew=True),
]
SIZES = st.integers(1, 200)


def peers(names: Sequence[str], dtype: str = "bf16") -> list[Implementation]:
    folder, wanted = adapter_folder(ADAPTERS, {}), DTYPES[dtype]
    found = find_peers(
        BENCHMARKS[dtype], folder, {}, lambda peer: [peer] if peer.layout is wanted else []
    )
    return select(names, found)


def difference(got: torch.Tensor, inputs: Inputs, case: Case) -> str | None:
    return BENCHMARKS["bf16"].check.wrong(got, case, inputs)


@given(
    *(SIZES, SIZES, SIZES, st.integers(0, 99), st.integers(0, 99), st.integers(1, 300)),
    *(st.booleans(), st.booleans()),
)
def test_a_case_is_parsed_as_it_is_spelt(
    batch: int,
    queries: int,
    heads_kv: int,
    window: int,
    page: int,
    dim: int,
    causal: bool,
    skew: bool,
) -> None:
    kv = 0 if skew else queries + window
    heads = (heads_kv * 3, heads_kv)
    case = Case(batch, queries, kv, *heads, dim, causal, window, page, skew)
    assert Case.parse(str(case)) == case
    assert len(case.q_lens) == len(case.k_lens) == batch
    assert max(case.q_lens) == queries


def test_the_published_spelling() -> None:
    assert str(Case(16, 1024)) == "16x1024"
    for texts in (DEFAULT_CASES, FP8_CASES):
        assert [str(Case.parse(text)) for text in texts] == list(texts)
    # As the published times have it.
    assert Case(16, 1024).flops / 309.53e-6 == pytest.approx(444.5e12, rel=1e-3)


@pytest.mark.parametrize(
    "text",
    ["", "4", "0x4", "4x4096 p16 d64", "4x8 kv4", "4x8 h3/2", "4x8 kv9 skew", "4x8 w"],
)
def test_what_is_no_case_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="case: got"):
        Case.parse(text)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_work_is_counted_key_by_key(case: Case) -> None:
    seen = sum(
        (not case.causal or key <= k_len - q_len + query)
        and (not case.window or key >= k_len - q_len + query - case.window)
        for q_len, k_len in zip(case.q_lens, case.k_lens, strict=True)
        for query in range(q_len)
        for key in range(k_len)
    )
    assert case.flops == 4 * seen * case.heads_q * case.dim
    one = random_inputs(case, DTYPE, CPU)[0]
    moved = one.q.nbytes + one.out.nbytes + sum(x.nbytes for x in one.tokens(0)) * case.batch
    if not case.skew:
        assert case.num_bytes(2, 2) == moved


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_reference_is_that_of_the_op(case: Case) -> None:
    one = random_inputs(case, DTYPE, CPU)[0]
    [call] = ours().bind(case, [one])
    got = call().clone()
    assert difference(got, one, case) is None
    rows = checked_rows(case.q_lens[0], CPU)
    assert expected(one, case, 0, rows).shape == (len(rows), case.heads_q, case.dim)
    got[-1] += 1
    assert f"sequence {case.batch - 1} is off by" in str(difference(got, one, case))
    assert "got shape" in str(difference(got[:1], one, case))
    got[0, 0, 0] = torch.nan
    assert "sequence 0 is off by nan" in str(difference(got, one, case))


@pytest.mark.parametrize("case", [case for case in CASES if not case.page], ids=str)
def test_fp8_inputs_are_attended_to_and_compared_with_fp8_peers(case: Case) -> None:
    one = random_inputs(case, FP8, CPU)[0]
    assert one.q.dtype is one.k.dtype is one.v.dtype is FP8
    assert one.scales is not None
    if not case.skew:
        tokens = sum(x.nbytes for x in one.tokens(0)) * case.batch
        assert case.num_bytes(1, 2) == one.q.nbytes + one.out.nbytes + tokens
    [call] = ours("fp8").bind(case, [one])
    got = call().clone()
    assert got.dtype is torch.bfloat16
    assert difference(got, one, case) is None
    assert "expected 0.05 at most" in str(difference(1.1 * got, one, case))


@pytest.mark.parametrize("scales", ["static", "token"])
@pytest.mark.parametrize("kv_dtype", ["fp8", "int8"])
@pytest.mark.parametrize("case", [case for case in CASES if case.page], ids=str)
def test_8_bit_pages_are_attended_to(case: Case, kv_dtype: str, scales: str) -> None:
    layout = KVLayout(kv_dtype, scales)
    one = random_inputs(case, layout, CPU)[0]
    assert one.k.dtype is KV_DTYPES[kv_dtype]
    [call] = ours_over(kv_dtype, scales).bind(case, [one])
    assert difference(call(), one, case) is None
    assert "is off by" in str(difference(1.2 * call(), one, case))
    assert num_bytes(case, layout) < num_bytes(case, DTYPE)


def test_fp8_keys_in_pages_are_refused() -> None:
    sets = random_inputs(Case(2, 40, 0, 4, 2, 16, page=16), FP8, CPU)
    with pytest.raises(ValueError, match="FP8 keys are packed"):
        ours("fp8").bind(Case(2, 40, 0, 4, 2, 16, page=16), sets)


def test_the_scales_of_fp8_reach_fa3(monkeypatch: pytest.MonkeyPatch) -> None:
    flash = Flash()
    monkeypatch.setattr(FLASH_ATTN_3, "fa3", lambda library: (flash, ()))
    one = random_inputs(CASE, FP8, CPU)[0]
    [peer] = peers(["fa3_fp8"], "fp8")
    [call] = peer.bind(CASE, [one])
    call()
    [arguments] = flash.calls
    assert len(arguments) == 34
    assert arguments[15:20] == (None,) * 5
    assert all(scales is one.scales for scales in arguments[20:23])


def test_fp8_times_are_compared_with_fp8_peers_alone() -> None:
    case = Case(4, 4096)
    measured = {case: {"ostinato_fp8": 600.0}}
    published = {case: {"fa3": 900.0, "fa3_fp8": 800.0, "cudnn": 1.0}}
    assert (
        "4x4096                    916, fa3_fp8 687: 1.333 of it"
        in BENCHMARKS["fp8"].summary.lines(measured, published)[4]
    )


def test_both_ends_of_a_long_text_are_checked() -> None:
    rows = checked_rows(300, CPU).tolist()
    assert rows == [*range(64), *range(236, 300)]
    assert checked_rows(100, CPU).tolist() == list(range(100))


def test_sets_share_their_table_and_nothing_else() -> None:
    first, second = random_inputs(Case(2, 40, 0, 4, 2, 16, page=16), DTYPE, CPU)
    assert first.table is second.table
    assert first.seq_lens.tolist() == [40, 40]
    for mine, other in ((first.k, second.k), (first.q, second.q)):
        assert not torch.equal(mine, other)
    assert first.k[int(first.table[0, 2]), 8:].isnan().all()  # type: ignore[index]


def changed(by: Callable[[torch.Tensor], torch.Tensor]) -> Implementation:
    """Return a peer whose results are ours, changed."""

    def bind(case: Case, sets: Sequence[Inputs]) -> list[Call]:
        return [lambda call=call: by(call().clone()) for call in ours().bind(case, sets)]

    return Implementation("fa3", DTYPE, bind)


def test_every_right_result_has_a_row_and_the_others_a_reason() -> None:
    def refuse(case: Case, sets: Sequence[Inputs]) -> list[Call]:
        raise OSError("not compiled\nand more")

    impls = [ours(), changed(lambda out: out), Implementation("fi_fa2", DTYPE, refuse)]
    [result] = time_cases(BENCHMARKS["bf16"], [CASE], impls, CPU)
    assert [row.impl for row in result.rows] == ["ostinato_bf16", "fa3"]
    assert {(row.section, row.case) for row in result.rows} == {("prefill", "2x70 h4/2 d16")}
    assert all(row.us > 0 for row in result.rows)
    assert result.unsupported == {"fi_fa2": "not compiled"}
    assert result.failures == {}


def test_a_wrong_result_is_a_failure() -> None:
    [result] = time_cases(BENCHMARKS["bf16"], [CASE], [changed(lambda out: out * 1.1)], CPU)
    assert result.rows == []
    assert result.failures["fa3"].startswith("wrong result: sequence 0 is off by 0.1")


class Flash:
    """In place of FlashAttention-3's ops: keeps what it was called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []

    def fwd(self, *arguments: object) -> None:
        self.calls.append(arguments)


@pytest.mark.parametrize("name", ["fa3", "fa3_dense"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_fa3_is_told_where_sequences_lie(
    case: Case, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    flash = Flash()
    monkeypatch.setattr(FLASH_ATTN_3, "fa3", lambda library: (flash, ()))
    one = random_inputs(case, DTYPE, CPU)[0]
    [peer] = peers([name])
    if name == "fa3_dense" and not (case.is_dense and case.is_square):
        with pytest.raises(ValueError, match="sequences of one length, packed"):
            peer.bind(case, [one])
        return
    [call] = peer.bind(case, [one])
    assert call() is one.out
    [arguments] = flash.calls
    assert len(arguments) == 34
    # cu_seqlens_q, cu_seqlens_k, seqused_k, max_seqlen_q, max_seqlen_k, page_table
    places = tuple(arguments[i] for i in (7, 8, 11, 12, 13, 14))
    if name == "fa3_dense":
        assert places == (None,) * 6
        assert arguments[0].shape == (case.batch, case.queries, 4, 16)[:2] + one.q.shape[1:]
    elif case.page:
        assert places == (one.cu_seqlens_q, None, one.seq_lens, case.queries, None, one.table)
    else:
        offsets = (one.cu_seqlens_q, one.cu_seqlens_k)
        assert places == (*offsets, None, max(case.q_lens), max(case.k_lens), None)
    left, right = case.window or -1, 0 if case.causal else -1
    assert arguments[23:27] == (case.dim**-0.5, case.causal, left, right)
    assert arguments[31] == (1 if case.is_square else 0)


def test_sglang_kernel_is_not_asked_for_a_head_dim_that_it_lacks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(FLASH_ATTN_3, "fa3", lambda library: (Flash(), (None,)))
    [peer] = peers(["fa3"])
    with pytest.raises(ValueError, match="head dims are 64 and 128"):
        peer.bind(CASE, random_inputs(CASE, DTYPE, CPU))


@pytest.mark.parametrize("case", [CASE, CASES[2]], ids=str)
def test_torchs_operator_attends_where_sequences_make_a_tensor(case: Case) -> None:
    one = random_inputs(case, DTYPE, CPU)[0]
    [peer] = peers(["fa2"])
    [call] = peer.bind(case, [one])
    assert difference(call(), one, case) is None


@pytest.mark.parametrize("case", [CASES[1], *CASES[3:]], ids=str)
def test_torchs_operator_does_not_take_other_cases(case: Case) -> None:
    for peer in peers(["cudnn", "fa2"]):
        with pytest.raises(ValueError, match="sequences of one length, packed, and no window"):
            peer.bind(case, random_inputs(case, DTYPE, CPU))


def test_names_of_peers() -> None:
    assert [peer.name for peer in peers(["fa2", "fa3"])] == ["fa3", "fa2"]
    assert [peer.name for peer in peers(list(BENCHMARKS["fp8"].peers), "fp8")] == ["fa3_fp8"]
    with pytest.raises(ValueError, match="got 'xqa', expected all or none or fa3"):
        peers(["xqa"])


def test_the_best_peer_counts_and_pages_face_packed_keys() -> None:
    plain, paged = Case(4, 4096), Case(4, 4096, page=16)
    measured = {
        plain: {"ostinato_bf16": 800.0, "fa3": 900.0, "cudnn": 1000.0, "fa3_fp8": 1.0},
        paged: {"ostinato_bf16": 840.0, "fa3": 800.0},
        Case(4, 4096, dim=64): {"ostinato_bf16": 500.0},
    }
    assert compare("ostinato_bf16", measured, measured, partial(is_rival, "ostinato_bf16")) == [
        Cell(plain, 800.0, "fa3", 900.0),
        Cell(paged, 840.0, "fa3", 800.0),
    ]
    text = "\n".join(BENCHMARKS["bf16"].summary.lines(measured, measured))
    assert "4x4096                    687, fa3 611: 1.125 of it" in text
    assert "  causal, head dim 128, texts of 1024 and more: ×0.889, at most ×0.889, 1 cases" in text
    assert "  in pages: ×1.050, at most ×1.050, 1 cases" in text
    assert "  worst: 4x4096 p16 ×1.050 of fa3" in text
    assert "  4x4096 p16 / 4x4096: ×1.050" in text
