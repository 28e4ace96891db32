"""`bench decode`: its rows, its summary, its limits and its complaints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ostinato.cli.main import main

SMALL = "--heads 4/2 --batch 1 2 --kv 33 --head-dim 16 --device cpu"


def run(arguments: str, *more: str) -> int:
    return main(["bench", "decode", *arguments.split(), *more])


def test_ours_is_measured_for_every_page_and_cache(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, targets = tmp_path / "decode.json", tmp_path / "targets.json"
    known = [
        {"section": "decode", "case": "4/2 b1 kv33 d16", "peer": "fa3_p16", "us": 1e9},
        {"section": "gemm", "case": "N64 K128 M1", "peer": "sgl_f8", "us": 1},
    ]
    targets.write_text(json.dumps({"rows": known}))
    flags = ["--json", str(file), "--targets", str(targets)]
    kinds = "--kv-dtype bf16 int8 --kv-scales static token"
    assert run(f"{SMALL} --page 16 5 {kinds} --q-len 1 2 --skew", *flags) == 0
    rows = json.loads(file.read_text())["rows"]
    suffixes = ("", "_int8kv", "_int8kv_token")
    impls = [f"ostinato_p{page}{kv}" for kv in suffixes for page in (16, 5)]
    cases = [
        f"4/2 b{batch} kv33{q} d16{skew}"
        for q, skews in (("", ("", " skew")), (" q2", ("", " skew")))
        for skew in skews
        for batch in (1, 2)
        if batch > 1 or not skew
    ]
    assert [(row["case"], row["impl"]) for row in rows] == [(c, i) for c in cases for i in impls]
    assert {row["impl"]: row.get("peer") for row in rows} == {
        f"ostinato_p{page}{kv}": f"ostinato_p{page}" if kv else None
        for page in (16, 5)
        for kv in suffixes
    }
    printed = capsys.readouterr().out
    assert file.with_suffix(".txt").read_text() == printed
    assert "fa3_p16 is not timed: No module named 'flash_attn_interface'" in printed
    assert "fa3_p16  1000000000.00" in printed.split("== against the targets")[1]


def test_targets_that_are_not_measured_are_counted_and_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    targets = tmp_path / "targets.json"

    def printed_for(*others: str) -> str:
        rows = [
            {"section": "decode", "case": case, "peer": "fa3_p16", "us": 1}
            for case in ("4/2 b1 kv33 d16", *others)
        ]
        targets.write_text(json.dumps({"rows": rows}))
        assert run(f"{SMALL} --batch 1 --page 16 --peer none", "--targets", str(targets)) == 0
        return capsys.readouterr().out

    assert "not measured" not in printed_for()
    two = printed_for("4/4 b1 kv33 d16", "4/2 b9 kv33 d16")
    assert two.endswith("targets not measured: 2 of 3: 4/2 b9 kv33 d16, 4/4 b1 kv33 d16\n")
    many = printed_for(*(f"4/2 b{batch} kv33 d16" for batch in range(2, 50)))
    assert many.endswith("4/2 b21 kv33 d16 and 28 more\n")


def test_caches_may_be_of_any_size(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(f"{SMALL} --page 16 --peer none --max-kv-gb inf") == 0
    assert "4/2 b2 kv33 d16" in capsys.readouterr().out


def test_what_the_budget_leaves_out_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(f"{SMALL} --page 16 --peer none --budget-s 1e-9") == 0
    message = "since the budget was spent: 4/2 b1 kv33 d16, 4/2 b2 kv33 d16\n"
    assert capsys.readouterr().out.endswith(message)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--heads 8/3", "got '8/3', expected query heads that are a multiple"),
        ("--batch 0", "expected sizes of at least 1"),
        ("--kv 4 --q-len 8", "expected no more queries than tokens"),
        ("--page 0", "--page: got 0, expected at least 1"),
        ("--peer fa2", "--peer: got 'fa2', expected all or none or fa3"),
        ("--peer xqa", "xqa_p16: No module named 'flashinfer'"),
        ("--json f.txt", "--json: got f.txt, expected another suffix than .txt"),
        ("--max-kv-gb 1e-9", "--max-kv-gb: got 1e-09, expected room for a case"),
        ("--max-kv-gb nan", "--max-kv-gb: got nan, expected room for a case"),
    ],
)
def test_bad_input_is_named(
    arguments: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(f"--device cpu {arguments}") == 2
    assert message in capsys.readouterr().err
