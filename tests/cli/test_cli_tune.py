"""`tune`: what it refuses, and on a GPU what it leaves behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from ostinato.bench.tune_table import known_choices
from ostinato.cli.main import main


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
