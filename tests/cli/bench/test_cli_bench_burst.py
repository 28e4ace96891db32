"""`bench burst`: its table and its document, and the load that it puts on the host."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from ostinato.bench.graphs import burst
from ostinato.cli.main import main

SIZES = [
    "--shape",
    "tiny",
    "--batch",
    "2",
    "1",
    "--context",
    "20",
    "--steps",
    "4",
    "--repeats",
    "2",
]


def test_bursts_are_measured_beside_stepping(
    tmp_path: Path,
    device: torch.device,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(burst, "_loaded_host", nullcontext)
    file = tmp_path / "burst.json"
    assert main(["bench", "burst", *SIZES, "--json", str(file), "--device", str(device)]) == 0
    document = json.loads(file.read_text())
    assert list(document) == ["gpu", "versions", "commit", "rows"]
    ways = [("replays", "idle")]
    ways += [(impl, host) for host in ("idle", "loaded") for impl in ("stepping", "burst")]
    ways.append(("loop", "idle"))
    assert [(row["case"], row["impl"], row["host"]) for row in document["rows"]] == [
        (f"tiny int8 b{batch} ctx20", *way) for batch in (1, 2) for way in ways
    ]
    for row in document["rows"]:
        assert row["section"] == "burst"
        assert 0 < row["us_p50"] <= row["us_p99"]
        assert row["us_mean"] > 0
        assert row["identical"] is (True if row["impl"] in ("stepping", "burst") else None)
    assert capsys.readouterr().out.count("as stepping") == 8


def test_tokens_that_differ_fail_the_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [burst.BurstRow("burst", "tiny", "burst", "idle", 1.0, 1.0, 2.5, identical=False)]
    monkeypatch.setattr(burst, "time_bursts", lambda *_: iter(rows))
    assert main(["bench", "burst", *SIZES, "--device", "cpu"]) == 1
    printed = capsys.readouterr().out
    assert "DIFFER" in printed
    assert "1.5" in printed  # the jitter


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ("--steps 1", "steps: got 1, expected at least 2"),
        ("--batch 0", "batch: got 0, expected at least 1"),
        ("--context 9000", "context: got 9000 and 4 steps"),
        ("--repeats 1", "repeats: got 1, expected at least 2"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    arguments: str, error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "burst", *SIZES, *arguments.split(), "--device", "cpu"]) == 2
    assert error in capsys.readouterr().err


def test_the_load_ends_with_its_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    before = threading.active_count()
    with burst._loaded_host():
        assert threading.active_count() == before + burst._SPIN_THREADS
    deadline = threading.Event()
    for _ in range(100):
        if threading.active_count() == before:
            break
        deadline.wait(0.05)
    assert threading.active_count() == before


def test_the_first_slots_are_those_of_the_last_position() -> None:
    inputs = {
        "positions": torch.tensor([0, 17, 40]),
        "page_table": torch.tensor([[5, 6], [7, 8], [9, 10]]),
    }
    # A position behind the table, as after the last step, is not used: any page does.
    assert burst._slots(inputs, 16).tolist() == [80, 129, 168]


def test_the_load_on_the_host_ends_with_the_benchmark(tmp_path: Path) -> None:
    children = tmp_path / "children"
    script = f"""
import os, time
from ostinato.bench.graphs import burst
os.cpu_count = lambda: 2
with burst._loaded_host():
    listed = open(f"/proc/{{os.getpid()}}/task/{{os.getpid()}}/children").read()
    open({str(children)!r}, "w").write(listed + " end")
    time.sleep(60)
"""
    process = subprocess.Popen([sys.executable, "-c", script])
    try:
        while not (children.exists() and children.read_text().endswith("end")):
            assert process.poll() is None
            time.sleep(0.05)
    finally:
        process.kill()
        process.wait()
    spinning = [int(line) for line in children.read_text().split()[:-1]]
    assert len(spinning) >= 2
    deadline = time.monotonic() + 30
    while any(Path(f"/proc/{pid}/cmdline").exists() for pid in spinning):
        assert time.monotonic() < deadline
        time.sleep(0.05)
