"""Which choices are timed, which of them wins, and the file that they are kept in."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato.bench.gemm.cases import SHAPE_GROUPS, Case, Shape
from ostinato.bench.tune.candidates import candidates
from ostinato.bench.tune.run import (
    TUNED_M,
    Timed,
    Tuned,
    choices,
    fastest,
    monotone,
    tunable_variants,
)
from ostinato.bench.tune.table import Table, known_choices, time_row
from ostinato.ops.linear import tile_table, tile_tuning
from ostinato.ops.linear.gemm_variants import GemmSmallM, GemmTiled
from ostinato.ops.linear.tile_table import Choice
from ostinato.ops.linear.tile_tuning import TunedRow

SHAPE = Shape(6144, 4096)
GPU = "NVIDIA H200"
TILE = GemmTiled(dtype="int8", out_dtype="bf16", channels=128, tokens=128)
SMALL = GemmSmallM(out_dtype="bf16", max_m=8)


@pytest.mark.parametrize("operand", ["int8", "e4m3"])
@given(n=st.integers(1, 60000), k=st.integers(1, 30000), m=st.integers(1, 9000))
def test_all_candidates_are_legal(operand: str, n: int, k: int, m: int) -> None:
    variants = tunable_variants(operand)
    found = candidates(Case(Shape(n, k), m), variants)
    assert found
    assert len(set(found)) == len(found)
    for choice in found:
        variant = choice.variant
        assert variant in variants
        assert tile_table.serving(choice, m, n, True, True, False, 132) == choice
        if isinstance(variant, GemmSmallM):
            assert choice == Choice(variant)
        else:
            assert 16 <= choice.tile_channels <= variant.channels
            assert choice.tile_channels % 16 == 0
            assert 1 <= choice.tile_tokens <= variant.tokens
            assert choice.cluster == 1 or choice.tile_channels < n or choice.tile_tokens < m
            sharing = (choice.cluster, choice.share_weights, choice.split_k)
            assert sharing in ((1, 0, 0), (2, 0, 0), (2, 1, 0), (2, 0, 2))
            assert choice.split_k == 0 or tile_table.can_split(choice, m, n, 132)
            assert choice.band in (0, 1, 8)
            assert choice.band == 0 or m >= 1024


@pytest.mark.parametrize("m", TUNED_M)
@pytest.mark.parametrize("shape", SHAPE_GROUPS["llama-8b"], ids=str)
def test_few_enough_candidates(shape: Shape, m: int) -> None:
    found = choices(Case(shape, m), "int8", 132)
    assert 2 <= len(found) <= 120
    assert found[0] == tile_table.choose(m, shape.n, shape.k, "int8", "bf16", packed=True)


def test_candidates_share_the_work_of_all_sms() -> None:
    tiles = {
        (choice.variant.channels, choice.tile_channels, choice.tile_tokens)
        for choice in candidates(Case(SHAPE, 64), tunable_variants("int8"))
        if isinstance(choice.variant, GemmTiled)
    }
    # 384 weight tiles of 16 channels: three for each of 128 SMs, or four for each of 96.
    assert {(64, 48, 64), (64, 64, 64)} <= tiles
    large = {
        (choice.variant.channels, choice.variant.tokens, choice.variant.pingpong)
        for choice in candidates(Case(SHAPE, 8192), tunable_variants("int8"))
        if isinstance(choice.variant, GemmTiled)
    }
    assert {(128, 256, False), (128, 128, True)} <= large
    assert min(channels * tokens for channels, tokens, _ in large) >= 96 * 128


def test_streaming_kernels_are_those_for_just_so_many_tokens() -> None:
    for m, max_m in ((1, 8), (8, 8), (9, 16), (16, 16), (17, None)):
        found = candidates(Case(SHAPE, m), tunable_variants("int8"))
        sizes = {c.variant.max_m for c in found if isinstance(c.variant, GemmSmallM)}
        assert sizes == ({max_m} if max_m else set())


def test_the_first_of_those_that_tie_wins() -> None:
    timed = [
        Timed(Choice(TILE, 128, 128), 10.09, True),
        Timed(Choice(TILE, 64, 128), 10.0, True),
        Timed(Choice(TILE, 32, 128), 9.0, False),
    ]
    assert fastest(timed) == timed[0]
    assert fastest([Timed(timed[0].choice, 10.2, True), *timed[1:]]) == timed[1]
    failed = Timed(timed[0].choice, math.inf, failure="wrong result")
    assert fastest([failed, *timed[1:]]) == timed[1]


CHOICES = st.sampled_from([Choice(TILE, channels, 64) for channels in (16, 32, 64, 128)])


@given(st.dictionaries(st.integers(1, 99), st.tuples(CHOICES, st.floats(1, 9)), min_size=1))
def test_time_grows_with_m_in_a_table(measured: dict[int, tuple[Choice, float]]) -> None:
    tuned = [Tuned(m, choice, us) for m, (choice, us) in measured.items()]
    rows = monotone(tuned)
    assert rows[-1].m == max(measured)
    for before, after in pairwise(rows):
        assert before.m < after.m
        assert before.us < after.us
        assert before.choice != after.choice
    for one in tuned:
        served = next(row.choice for row in rows if row.m >= one.m)
        known = [row.us for row in tuned if row.m >= one.m and row.choice == served]
        assert min(known) <= one.us


def test_the_ops_read_what_was_tuned(tmp_path: Path) -> None:
    file = tmp_path / "table.json"
    table = Table(GPU, {})
    tile = Choice(TILE, 96, 64, cluster=2, band=8)
    table.put("int8", SHAPE, [Tuned(8, Choice(SMALL), 6.0), Tuned(64, tile, 9.0)], m_min=4)
    table.write(file)
    document = json.loads(file.read_text())
    assert list(document) == ["gpu", "versions", "commit", "source", "rows"]
    assert (document["gpu"], document["source"]) == (GPU, tile_tuning.sources_hash())
    rows = known_choices(file, GPU)["int8", 6144, 4096]
    assert rows == [TunedRow(4, 8, Choice(SMALL)), TunedRow(4, 64, tile)]


def test_a_table_goes_on_where_it_was(tmp_path: Path) -> None:
    file = tmp_path / "table.json"
    first = Table(GPU, {})
    first.put("int8", SHAPE, [Tuned(8, Choice(SMALL), 6.0)], m_min=4)
    first.write(file)
    again = Table(GPU, known_choices(file, GPU))
    assert again.covers("int8", SHAPE, [4, 8])
    assert not again.covers("int8", SHAPE, [1, 8])
    assert not again.covers("int8", SHAPE, [4, 9])
    assert not again.covers("e4m3", SHAPE, [8])
    again.put("int8", SHAPE, [Tuned(8, Choice(TILE, 64, 8), 6.0)], m_min=4)
    again.write(file)
    [row] = known_choices(file, GPU)["int8", 6144, 4096]
    assert row.choice == Choice(TILE, 64, 8)


def test_two_runs_keep_what_each_has_found(tmp_path: Path) -> None:
    file, other, third = tmp_path / "table.json", Shape(1024, 256), Shape(2048, 512)
    tables = [Table(GPU, {}), Table(GPU, {})]
    for table, shape in zip(tables, (SHAPE, other), strict=True):
        table.put("int8", shape, [Tuned(8, Choice(SMALL), 6.0)], m_min=4)
        table.write(file)
    tables[0].put("int8", third, [Tuned(64, Choice(TILE), 6.0)], m_min=1)
    tables[0].write(file)
    assert {Shape(n, k) for _, n, k in known_choices(file, GPU)} == {SHAPE, other, third}


def test_choices_for_other_tokens_are_kept(tmp_path: Path) -> None:
    file = tmp_path / "table.json"
    few, some, many, new = (Choice(TILE, channels, 64) for channels in (16, 32, 64, 96))
    table = Table(GPU, {})
    ladder = [Tuned(8, few, 1.0), Tuned(64, some, 2.0), Tuned(512, many, 3.0)]
    table.put("int8", SHAPE, ladder, m_min=1)
    table.put("int8", SHAPE, [Tuned(128, new, 2.5)], m_min=32)

    def served(m: int) -> Choice | None:
        table.write(file)
        rows = known_choices(file, GPU)["int8", 6144, 4096]
        return next((row.choice for row in rows if row.m_min <= m <= row.m_max), None)

    expected = {8: few, 9: some, 31: some, 32: new, 128: new, 129: many, 512: many, 513: None}
    assert {m: served(m) for m in expected} == expected
    table.put("int8", SHAPE, [Tuned(4096, new, 9.0)], m_min=4096)
    assert {m: served(m) for m in expected} == expected
    assert served(4096) == new
    assert not table.covers("int8", SHAPE, [512, 1024, 4096])
    assert table.covers("int8", SHAPE, [1, 512, 4096])


def test_a_table_of_other_sources_is_begun_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "table.json"
    assert known_choices(file, GPU) == {}
    table = Table(GPU, {})
    table.put("int8", SHAPE, [Tuned(8, Choice(SMALL), 6.0)], m_min=8)
    table.write(file)
    monkeypatch.setattr(tile_tuning, "sources_hash", lambda: "0" * 16)
    assert known_choices(file, GPU) == {}
    file.write_text("{}")
    with pytest.raises(ValueError, match="gpu: got NoneType, expected str"):
        known_choices(file, GPU)


def test_a_table_of_another_gpu_is_not_written_over(tmp_path: Path) -> None:
    file = tmp_path / "table.json"
    table = Table("another GPU", {})
    table.write(file)
    assert known_choices(file, GPU) == {}
    table.put("int8", SHAPE, [Tuned(8, Choice(SMALL), 6.0)], m_min=8)
    table.write(file)
    with pytest.raises(ValueError, match=f"{file}: got rows of another GPU, expected {GPU}'s"):
        known_choices(file, GPU)


def test_every_time_is_a_row() -> None:
    choice = Choice(TILE, 96, 64, cluster=2, band=8)
    assert time_row("int8", Case(SHAPE, 64), Timed(choice, 9.12345, True)) == {
        "dtype": "int8",
        "n": 6144,
        "k": 4096,
        "m": 64,
        "variant": TILE.name,
        **choice.cut,
        "us": 9.123,
        "final": True,
    }
