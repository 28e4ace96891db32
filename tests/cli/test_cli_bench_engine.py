"""`bench engine`: its rows, the split of starting up, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from ostinato.cli.main import main


def test_every_batch_and_the_start_up_are_measured(
    tmp_path: Path, device: torch.device, capsys: pytest.CaptureFixture[str]
) -> None:
    file, targets = tmp_path / "engine.json", tmp_path / "targets.json"
    theirs = {"section": "engine", "case": "tiny b2 prompt8", "impl": "other_int8", "us": 0.5}
    targets.write_text(json.dumps({"rows": [theirs]}))
    sizes = "--batch 2 1 --prompt 8 --output 2 6 --repeats 2 --page-size 4 --dtype int8 bf16"
    flags = ["--json", str(file), "--targets", str(targets), "--device", str(device)]
    assert main(["bench", "engine", "--shape", "tiny", *sizes.split(), *flags]) == 0
    document = json.loads(file.read_text())
    assert [(row["section"], row["case"], row["impl"]) for row in document["rows"]] == [
        row
        for dtype in ("int8", "bf16")
        for row in (
            ("startup", "tiny startup", f"ostinato_{dtype}"),
            ("engine", "tiny b1 prompt8", f"ostinato_{dtype}"),
            ("engine", "tiny b2 prompt8", f"ostinato_{dtype}"),
        )
    ]
    start_up, *rows = document["rows"][:3]
    assert start_up["graphs"] == 2
    assert start_up["load_s"] > 0
    assert start_up["capture_s"] >= start_up["warmup_s"] + start_up["verify_s"]
    assert all(row["us"] > 0 for row in rows)
    lines = capsys.readouterr().out.splitlines()
    assert [
        line.partition("   ×")[2].split(" of ")[1:] for line in lines if "b2 prompt8" in line
    ] == [
        ["0"],
        [],
    ]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ("--shape tiny --batch 0", "batch: got 0, expected at least 1"),
        ("--shape tiny --prompt 0", "prompt: got 0, expected at least 1"),
        ("--shape tiny --output 8 8", "output: got 8 and 8, expected a longer second"),
        ("--shape tiny --output 0 8", "output: got 0, expected at least 1"),
        ("--shape tiny --repeats 0", "repeats: got 0, expected at least 1"),
        (
            "--shape tiny --prompt 2000 --output 2 49",
            "prompt and output: got 2049 tokens, expected at most the model's 2048",
        ),
        ("--shape tiny --targets {missing}", "not a document of engines' times"),
        ("--batch 1", "the following arguments are required: --shape"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    arguments: str, error: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = arguments.format(missing=tmp_path / "missing.json").split()
    assert main(["bench", "engine", *argv]) == 2
    assert error in capsys.readouterr().err
