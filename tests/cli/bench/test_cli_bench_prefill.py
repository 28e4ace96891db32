"""`bench prefill`: its rows, its summary, its limits and its complaints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ostinato.cli.main import main


def run(*arguments: str) -> int:
    return main(["bench", "prefill", "--device", "cpu", *arguments])


def test_ours_is_measured_beside_torch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, targets = tmp_path / "prefill.json", tmp_path / "targets.json"
    known = [
        {"section": "prefill", "case": "2x33 h4/2 d16", "peer": "fa3", "us": 1e9},
        {"section": "decode", "case": "32/8 b1 kv512", "peer": "fa3_p16", "us": 1},
    ]
    targets.write_text(json.dumps({"rows": known}))
    cases = ["2x33 h4/2 d16", "2x33 h4/2 d16 p16"]
    assert run("--cases", *cases, "--json", str(file), "--targets", str(targets)) == 0
    rows = json.loads(file.read_text())["rows"]
    impls = [("ostinato_bf16", cases[0]), ("fa2", cases[0]), ("ostinato_bf16", cases[1])]
    assert [(row["impl"], row["case"]) for row in rows] == impls
    assert {row["section"] for row in rows} == {"prefill"}
    printed = capsys.readouterr().out
    assert file.with_suffix(".txt").read_text() == printed
    assert "fa3 is not timed: No module named 'flash_attn_interface'" in printed
    assert "fa2 cannot: sequences of one length, packed, and no window" in printed
    assert "2x33 h4/2 d16 p16 / 2x33 h4/2 d16: ×" in printed
    assert "1000000000.00" in printed.split("== against the targets")[1]


def test_8_bit_pages_are_measured_beside_16_bits(tmp_path: Path) -> None:
    file = tmp_path / "prefill.json"
    flags = ["--kv-dtype", "bf16", "fp8", "int8", "--kv-scales", "static", "token"]
    case = "2x33 kv40 h4/2 d16 p16"
    assert run("--cases", case, *flags, "--peer", "none", "--json", str(file)) == 0
    rows = json.loads(file.read_text())["rows"]
    kinds = ["", "_fp8kv", "_int8kv", "_fp8kv_token", "_int8kv_token"]
    assert {row["case"] for row in rows} == {case}
    assert sorted(row["impl"] for row in rows) == sorted(f"ostinato_bf16{kind}" for kind in kinds)
    [usual] = (row["us"] for row in rows if row["impl"] == "ostinato_bf16")
    for row in rows:
        if row["impl"] != "ostinato_bf16":
            assert row["peer"] == "ostinato_bf16"
            assert row["ratio"] == pytest.approx(row["us"] / usual, rel=1e-3)


def test_what_the_budget_leaves_out_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--cases", "2x9 d16", "2x8 d16", "--peer", "none", "--budget-s", "1e-9") == 0
    message = "since the budget was spent: 2x9 d16, 2x8 d16\n"
    assert capsys.readouterr().out.endswith(message)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--cases 4", "--cases: case: got '4', expected one like '4x4096'"),
        ("--cases 4x0", "expected sizes of at least 1"),
        ("--dtype fp8 --kv-dtype int8", "--kv-dtype goes with --dtype bf16"),
        ("--cases 2x9 --kv-dtype int8", "--kv-dtype: got case 2x9, expected cases with pages"),
        ("--peer xqa", "--peer: got 'xqa', expected all or none or fa3"),
        ("--peer fi_fa2", "fi_fa2: No module named 'flashinfer'"),
        ("--json /nowhere/f.json", "--json"),
        ("--json f.txt", "--json: got f.txt, expected another suffix than .txt"),
    ],
)
def test_bad_input_is_named(
    arguments: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*arguments.split()) == 2
    assert message in capsys.readouterr().err
