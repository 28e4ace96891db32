"""`bench cpu`: its rows beside transformers', and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ostinato.bench.cpu.agreement import agreement, common_prefix
from ostinato.bench.cpu.questions import QUESTIONS
from ostinato.cli.main import main

TINY = "examples/tiny-llama"


def test_steps_and_a_prompt_are_timed_beside(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "cpu.json"
    sizes = ["--batch", "2", "--prompt", "9", "--repeats", "1", "--dtype", "fp32"]
    assert main(["bench", "cpu", "--model", TINY, *sizes, "--json", str(file)]) == 0
    document = json.loads(file.read_text())
    assert document["versions"]["transformers"]
    assert document["gpu"]
    assert [(row["case"], row["impl"], row["peer"]) for row in document["rows"]] == [
        (case, "ostinato_fp32", "transformers_fp32") for case in ("b2 decode", "prompt9")
    ]
    for row in document["rows"]:
        assert row["ratio"] == pytest.approx(row["us"] / row["peer_us"], abs=2e-3)
        assert row["threads"] >= 1
    assert "of transformers_fp32" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--batch", "0"], "batch: got 0"),
        (["--prompt", "0"], "prompt: got 0"),
        (["--repeats", "0"], "repeats: got 0"),
    ],
)
def test_numbers_that_are_too_small_are_refused(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "cpu", "--model", TINY, *flags]) != 0
    assert message in capsys.readouterr().err


def test_agreement_is_the_mean_of_common_prefixes() -> None:
    assert common_prefix([1, 2, 3], [1, 2, 4]) == 2
    assert common_prefix([1], [2]) == 0
    assert common_prefix([5, 6], [5, 6]) == 2
    expected = [[1, 2, 3, 4], [5, 6, 7, 8]]
    theirs = agreement("transformers_bf16", [[1, 2, 3, 4], [5, 6, 0, 8]], expected)
    assert (theirs.mean, theirs.lengths, theirs.ratio) == (3.0, [4, 2], None)
    ours = agreement("ostinato_bf16", [[1, 0, 3, 4], [5, 6, 7, 0]], expected, theirs)
    assert (ours.mean, ours.lengths, ours.ratio) == (2.0, [1, 3], 0.667)
    assert ours.case == "2 prompts, 4 tokens"


def test_there_are_fifty_questions() -> None:
    assert len(set(QUESTIONS)) == 50
