"""`tune`: what it refuses, and on a GPU what it leaves behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from ostinato.bench.gemm.cases import Shape
from ostinato.bench.report import Report
from ostinato.bench.tune.run import Tuned
from ostinato.bench.tune.table import Table, known_choices
from ostinato.cli.main import main
from ostinato.ops.linear.gemm_variants import GEMM_SMALL_M, GEMM_TILED
from ostinato.ops.linear.tile_table import Choice


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ("--shapes 8x8 --model x", "argument --model: not allowed with argument --shapes"),
        ("--dtype int4", "argument --dtype: invalid choice: 'int4'"),
        ("--m 0", "--m: got 0, expected at least 1"),
        ("--budget-s -1", "--budget-s: got -1, expected more than 0"),
        ("--all-times no-such-folder/f", "--all-times: no-such-folder is not a folder"),
        ("--out no-such-folder/f", "--out: no-such-folder is not a folder"),
        ("--device cpu", "--device: got the CPU, expected a CUDA device"),
    ],
)
def test_bad_input_is_refused_in_one_line(
    arguments: str, error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tune", *arguments.split()]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"ostinato tune: error: {error}")
    assert printed.err.count("\n") == 1


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Pretend that there is an H200, on which one kernel wins; give the tokens of each shape."""
    timed: list[list[int]] = []

    def tune_shape(
        _shape: Shape, operands: list[str], tokens: list[int], *_: object
    ) -> dict[str, list[Tuned]]:
        timed.append(tokens)
        return {operand: [Tuned(tokens[-1], Choice(GEMM_TILED[0]), 6.0)] for operand in operands}

    report = Report.for_device(torch.device("cpu"))
    monkeypatch.setattr(Report, "for_device", lambda _: report)
    monkeypatch.setattr("ostinato.cli.tune._cuda", lambda _: torch.device("cuda", 0))
    monkeypatch.setattr("ostinato.cli.tune._compile", lambda *_: None)
    monkeypatch.setattr("ostinato.bench.tune.run.tune_shape", tune_shape)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda _: "NVIDIA H200")
    return timed


def test_a_shape_is_done_when_all_of_its_tokens_are(
    tmp_path: Path, h200: list[list[int]], capsys: pytest.CaptureFixture[str]
) -> None:
    def tune(*tokens: str) -> str:
        flags = ["--dtype", GEMM_TILED[0].dtype, "--out", str(tmp_path / "table.json")]
        assert main(["tune", "--shapes", "512x256", *flags, "--m", *tokens]) == 0
        return capsys.readouterr().out

    assert tune("4096").startswith("0 of 1")
    assert tune("8", "4096").startswith("0 of 1")
    assert tune("8", "100", "4096").startswith("1 of 1")
    assert tune("4").startswith("0 of 1")
    assert tune("4", "8", "4096").startswith("1 of 1")
    assert h200 == [[4096], [8, 4096], [4]]


def test_the_table_of_another_gpu_is_kept(
    tmp_path: Path, h200: list[list[int]], capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "table.json"
    table = Table("NVIDIA H100", {})
    table.put("int8", Shape(512, 256), [Tuned(8, Choice(GEMM_SMALL_M[0]), 6.0)], m_min=8)
    table.write(file)
    before = file.read_bytes()
    assert main(["tune", "--shapes", "512x256", "--m", "8", "--out", str(file)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert f"{file}: got rows of NVIDIA H100, expected NVIDIA H200's" in printed.err
    assert "--out" in printed.err
    assert file.read_bytes() == before
    assert h200 == []


@pytest.mark.gpu
def test_shapes_are_tuned_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table, times = tmp_path / "table.json", tmp_path / "times.json"
    flags = ["--m", "8", "64", "--out", str(table), "--all-times", str(times)]
    assert main(["tune", "--shapes", "512x256", *flags]) == 0
    assert "[4/4] N512 K256 M64 e4m3: " in capsys.readouterr().out
    found = known_choices(table, torch.cuda.get_device_name())
    assert set(found) == {("int8", 512, 256), ("e4m3", 512, 256)}
    assert all(rows[-1].m_max == 64 for rows in found.values())
    rows = json.loads(times.read_text())["rows"]
    assert {row["m"] for row in rows if row["final"]} == {8, 64}
    assert main(["tune", "--shapes", "512x256", *flags]) == 0
    assert f"1 of 1 shapes are in {table} already" in capsys.readouterr().out
