"""`bench moe`: routings are what they are called, results are checked, every case has a row."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from bench_adapters import ADAPTERS

from ostinato.bench.harness.benchmark import Implementation, each
from ostinato.bench.harness.peers import adapter_folder, find_peers
from ostinato.bench.harness.runner import time_cases
from ostinato.bench.moe import benchmark
from ostinato.bench.moe.benchmark import BENCHMARK, num_bytes
from ostinato.bench.moe.cases import ROUTINGS, SHAPE_NAMES, Case, Shape, choices
from ostinato.bench.moe.check import CHECK
from ostinato.bench.moe.impls import PEERS, RIVALS, ours
from ostinato.bench.moe.inputs import random_inputs
from ostinato.bench.report import FloorRow
from ostinato.bench.shapes import PRECISIONS
from ostinato.bench.step.roofline import Roofline
from ostinato.cli.bench import moe
from ostinato.cli.main import main

CPU = torch.device("cpu")
SHAPE = Shape(6, 2, 144, 40)


def test_a_case_is_spelt_as_it_is_read() -> None:
    case = Case(SHAPE_NAMES["qwen3-30b-a3b"], 8, "skewed")
    assert str(case) == "E128 k8 H2048 I768 M8 skewed"
    assert Case.parse(str(case)) == case
    assert Shape.parse("E8k2H4096I14336") == SHAPE_NAMES["mixtral-8x7b"]
    assert set(SHAPE_NAMES) == set(moe._SHAPES)
    assert moe._ROUTINGS == ROUTINGS


@pytest.mark.parametrize("text", ["E8k2H64", "E2k3H64I8", "E128k2H64I8", "E8k0H64I8"])
def test_what_is_no_shape_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"got .*, expected"):
        Shape.parse(text)


@pytest.mark.parametrize(("routing", "distinct"), [("balanced", 48), ("skewed", 40), ("one", 8)])
def test_routings_are_as_they_are_called(routing: str, distinct: int) -> None:
    case = Case(SHAPE_NAMES["qwen3-30b-a3b"], 6, routing)
    chosen = choices(case)
    assert all(len(set(token.tolist())) == 8 for token in chosen)
    assert case.distinct <= distinct
    counts = torch.bincount(choices(replace(case, m=512)).flatten(), minlength=128)
    most = {"balanced": 32, "skewed": 512, "one": 512}[routing]
    assert counts.max() <= most
    assert (counts.max() > 4 * counts.float().mean()) == (routing != "balanced")


@pytest.mark.parametrize("precision", PRECISIONS)
def test_ours_is_right_and_a_changed_token_is_not(precision: str) -> None:
    case = Case(SHAPE, 5, "skewed")
    sets = random_inputs(case, precision, CPU)
    assert not torch.equal(sets[0].ids, sets[1].ids)
    got = ours(precision).bind(case, sets)[0]().clone()
    assert CHECK.wrong(got, case, sets[0]) is None
    got[3] *= 1.3
    assert "is off by" in str(CHECK.wrong(got, case, sets[0]))
    assert "is off by" in str(CHECK.wrong(got * torch.nan, case, sets[0]))


def test_every_case_has_a_row_for_every_right_result() -> None:
    case = Case(SHAPE, 3, "balanced")
    wrong = Implementation("wrong", "bf16", each(lambda s: s.x))
    impls = [ours("bf16"), ours("int8"), wrong]
    (result,) = time_cases(BENCHMARK, [case], impls, CPU)
    assert [row.impl for row in result.rows] == ["ostinato_bf16", "ostinato_int8"]
    assert set(result.failures) == {"wrong"}
    assert result.rows[0].section == "moe"
    # Six experts of 3 · 144 · 40 weights, the router, and 3 tokens in and out.
    assert num_bytes(case, "bf16") == 6 * 2 * 3 * 144 * 40 + 2 * 6 * 144 + 2 * 2 * 3 * 144
    assert num_bytes(case, "int8") == 6 * (3 * 144 * 40 + 4 * 224) + 2 * 6 * 144 + 4 * 3 * 144


def test_peers_are_known_and_compared_with_their_like() -> None:
    found = find_peers(BENCHMARK, adapter_folder(ADAPTERS, {}), {})
    assert list(found) == list(PEERS)
    assert {name for rivals in RIVALS.values() for name in rivals} == set(PEERS)
    assert set(RIVALS) == {ours(precision).name for precision in PRECISIONS}


def test_the_command_writes_rows(tmp_path: Path) -> None:
    arguments = ["bench", "moe", "--shapes", "E6k2H144I40", "--m", "2", "--routing", "one"]
    code = main([*arguments, "--dtype", "fp8-block", "--peer", "none", "--device", "cpu",
                 "--json", str(tmp_path / "moe.json")])  # fmt: skip
    assert code == 0
    (row,) = json.loads((tmp_path / "moe.json").read_text())["rows"]
    assert (row["case"], row["impl"]) == ("E6 k2 H144 I40 M2 one", "ostinato_fp8_block")


def test_the_command_takes_cases_by_their_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, names = tmp_path / "moe.json", ["E6 k2 H144 I40 M3 one", "E4 k1 H72 I40 M1 skewed"]
    flags = ["bench", "moe", "--dtype", "int8", "--peer", "none", "--device", "cpu", "--cases"]
    assert main([*flags, *names, "--json", str(file)]) == 0
    assert [row["case"] for row in json.loads(file.read_text())["rows"]] == names
    assert main([*flags, "E6 k2 M3"]) != 0
    assert "--cases: case: got 'E6 k2 M3', expected one like" in capsys.readouterr().err


def test_our_rows_have_the_roofline_where_it_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    roofline = Roofline(1e12, {1: 2e12, 2: 1e12})
    monkeypatch.setattr(benchmark, "roofline_of", lambda device: roofline)
    few, many = Case(SHAPE, 1, "one"), Case(SHAPE, 4096, "one")
    assert benchmark.floor(few, "int8", CPU) == num_bytes(few, "int8") / 1e12
    assert benchmark.floor(many, "int8", CPU) == many.flops / 2e12
    assert benchmark.floor(many, "bf16", CPU) == many.flops / 1e12
    other = replace(ours("bf16"), name="other")
    (result,) = time_cases(BENCHMARK, [few], [ours("bf16"), other], CPU)
    assert isinstance(result.rows[0], FloorRow)
    assert result.rows[0].floor_us == round(num_bytes(few, "bf16") / 1e6, 2)
    assert not isinstance(result.rows[1], FloorRow)


def test_the_command_refuses_what_is_no_shape(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "moe", "--shapes", "llama"]) != 0
    assert "--shapes: got 'llama', expected qwen3-30b-a3b or" in capsys.readouterr().err
