"""`bench gemm`: its rows, its summary, its limits and its complaints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ostinato.bench.gemm import check
from ostinato.cli.main import main

SMALL = "--shapes 64x128 48x256 --m 20 1"
TORCH_PEERS = "--peer smm_row smm_ten bf16"


def run(arguments: str, *more: str) -> int:
    return main(["bench", "gemm", *arguments.split(), *more])


@pytest.mark.parametrize("where", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_ours_and_the_peers_are_measured_and_compared(
    where: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, targets = tmp_path / "gemm.json", tmp_path / "targets.json"
    known = [{"section": "gemm", "case": "N64 K128 M1", "peer": "sgl_f8", "us": 1e9}]
    targets.write_text(json.dumps({"rows": known}))
    flags = ["--json", str(file), "--targets", str(targets), "--device", where]
    assert run(f"{SMALL} {TORCH_PEERS} --pdl both", *flags) == 0
    document = json.loads(file.read_text())
    ours = [f"ostinato_{dtype}{pdl}" for dtype in ("int8", "fp8") for pdl in ("", "_nopdl")]
    assert [(row["section"], row["case"], row["impl"]) for row in document["rows"]] == [
        ("gemm", f"N{n} K{k} M{m}", impl)
        for n, k in ((64, 128), (48, 256))
        for m in (1, 20)
        for impl in (*ours, "smm_row", "smm_ten", "bf16")
    ]
    assert all(row["us"] > 0 for row in document["rows"])
    for row in document["rows"]:
        us = {one["impl"]: one["us"] for one in document["rows"] if one["case"] == row["case"]}
        if row["impl"] in ours:
            assert us[row["peer"]] == min(us["smm_row"], us["smm_ten"])  # not bf16: no W8A8 peer
            assert row["ratio"] == pytest.approx(row["us"] / us[row["peer"]], rel=1e-3)
        else:
            assert not {"peer", "ratio"} & set(row)
    printed = capsys.readouterr().out
    assert file.with_suffix(".txt").read_text() == printed
    run_part, target_part = printed.split("== against the targets")
    assert "== against the peers of this run" in run_part
    assert "ostinato_int8 / best peer:\n  all: ×" in run_part
    assert "sgl_f8   1000000000.00" in target_part


def test_bf16_is_compared_with_torchs_bf16(tmp_path: Path) -> None:
    file = tmp_path / "gemm.json"
    flags = ["--json", str(file), "--device", "cpu"]
    assert run(f"{SMALL} --dtype bf16 --peer smm_row bf16", *flags) == 0
    rows = json.loads(file.read_text())["rows"]
    ours = [row for row in rows if row["impl"] == "ostinato_bf16"]
    assert len(ours) == 4
    assert {row["peer"] for row in ours} == {"bf16"}


def test_by_default_what_is_not_installed_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--shapes 16x32 --m 1 --dtype int8 --device cpu") == 0
    printed = capsys.readouterr().out
    assert "sgl_i8 is not timed: No module named 'sgl_kernel'" in printed
    assert "smm_row" in printed


def test_by_default_peers_are_those_that_ours_is_compared_with(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run("--shapes 128x256 --m 1 --dtype fp8-block --device cpu") == 0
    printed = capsys.readouterr().out
    assert "smm_blk" in printed
    assert not any(name in printed for name in ("sgl_i8", "smm_row", "int_mm", "bf16"))


def test_no_peers(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--shapes 16x32 --m 1 --dtype fp8 --peer none --device cpu") == 0
    printed = capsys.readouterr().out
    assert "ostinato_fp8 " in printed
    assert "nothing to compare" in printed


def test_what_the_budget_leaves_out_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "gemm.json"
    flags = ["--budget-s", "1e-9", "--json", str(file)]
    assert run("--shapes 16x32 --m 1 2 --peer none --device cpu", *flags) == 0
    message = "not measured, since the budget was spent: N16 K32 M1, N16 K32 M2\n"
    assert capsys.readouterr().out.endswith(message)


def test_a_wrong_result_fails_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "gemm.json"
    monkeypatch.setattr(check, "difference", lambda *args, **kwargs: "all of it")
    assert (
        run("--shapes 16x32 --m 1 --dtype int8 --peer none --device cpu", "--json", str(file)) == 1
    )
    assert "N16 K32 M1               ostinato_int8 FAILED: wrong result: all of it" in (
        capsys.readouterr().out
    )
    assert json.loads(file.read_text())["rows"] == []


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ("--dtype int4", "argument --dtype: invalid choice: 'int4'"),
        ("--shapes 64", "--shapes: got '64', expected NxK such as 6144x4096 or one of llama-8b"),
        ("--shapes 0x64", "--shapes: got '0x64'"),
        ("--shapes 64x00", "--shapes: got '64x00'"),
        ("--m 0", "--m: got 0, expected at least 1"),
        ("--m x", "argument --m: invalid int value: 'x'"),
        ("--peer vllm", "--peer: got 'vllm', expected all or none or sgl_i8"),
        ("--peer all bf16", "--peer: got 'all'"),
        ("--peer sgl_i8", "sgl_i8: No module named 'sgl_kernel'"),
        ("--sgl-library no-such-file", "sgl_i8: no-such-file: no such file"),
        ("--pdl maybe", "argument --pdl: invalid choice: 'maybe'"),
        ("--budget-s 0", "--budget-s: got 0, expected more than 0"),
        ("--budget-s nan", "--budget-s: got nan, expected more than 0"),
        ("--json no-such-folder/f.json", "--json: no-such-folder is not a folder"),
        ("--json f.txt", "--json: got f.txt, expected another suffix than .txt"),
        ("--targets no-such-file", "no-such-file: No such file or directory"),
        ("--device tpu", "--device: got 'tpu'"),
    ],
)
def test_bad_input_is_refused_in_one_line(
    arguments: str, error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    device = [] if "--device" in arguments else ["--device", "cpu"]
    assert run(arguments, *device) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith(f"ostinato bench: error: {error}")
    assert printed.err.count("\n") == 1
