"""`bench engine`: its rows, the split of starting up, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ostinato.cli.main import main
from ostinato.engine import Engine, SamplingParams


def let_texts_take(monkeypatch: pytest.MonkeyPatch, seconds: Callable[[int], float]) -> None:
    """Let the bench's clock stand still but for the texts, which take `seconds` by their length."""
    now = 0.0
    generate = Engine.generate

    def timed(self: Engine, prompts: Any, params: SamplingParams) -> Any:
        nonlocal now
        completions = generate(self, prompts, params)
        now += seconds(params.max_tokens)
        return completions

    monkeypatch.setattr(Engine, "generate", timed)
    monkeypatch.setattr("ostinato.bench.engine.perf_counter", lambda: now)


def test_every_batch_and_the_start_up_are_measured(
    tmp_path: Path,
    device: torch.device,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    let_texts_take(monkeypatch, lambda tokens: 0.25 + 1e-3 * tokens)
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
            ("first_token", "tiny b1 prompt8", f"ostinato_{dtype}"),
            ("engine", "tiny b2 prompt8", f"ostinato_{dtype}"),
            ("first_token", "tiny b2 prompt8", f"ostinato_{dtype}"),
        )
    ]
    start_up, *rows = document["rows"][:5]
    # Two of steps; and one of prompts, of up to 16 tokens.
    assert start_up["graphs"] == (3 if device.type == "cuda" else 2)
    assert start_up["load_s"] > 0
    assert start_up["capture_s"] >= start_up["warmup_s"] + start_up["verify_s"]
    of_texts, first_tokens = rows[::2], rows[1::2]
    assert [row["us"] for row in of_texts] == [pytest.approx(1000)] * 2
    spans = [(row["short_s"], row["long_s"]) for row in of_texts]
    assert spans == [([0.252] * 2, [0.256] * 2)] * 2
    assert [(row["us"], row["texts_s"]) for row in first_tokens] == [(251e3, [0.251] * 2)] * 2
    lines = capsys.readouterr().out.splitlines()
    assert [
        line.partition("   ×")[2].split(" of ")[1:] for line in lines if "b2 prompt8" in line
    ] == [
        ["0"],
        [],
        [],
        [],
    ]


def test_every_kv_cache_is_measured(
    tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_texts_take(monkeypatch, lambda tokens: 0.25 + 1e-3 * tokens)
    file = tmp_path / "engine.json"
    sizes = "--batch 1 --prompt 8 --output 2 6 --repeats 1 --page-size 4"
    flags = ["--kv-cache-dtype", "auto", "int8", "--json", str(file), "--device", str(device)]
    assert main(["bench", "engine", "--shape", "tiny", *sizes.split(), *flags]) == 0
    rows = json.loads(file.read_text())["rows"]
    assert [row["impl"] for row in rows[::3]] == ["ostinato_int8", "ostinato_int8_int8kv_token"]
    steps = {row["impl"]: row["tb_s"] for row in rows if row["section"] == "engine"}
    assert steps["ostinato_int8_int8kv_token"] < steps["ostinato_int8"]  # in the same time
    assert [(row["section"], row["peer"], row["ratio"]) for row in rows if "peer" in row] == [
        (section, "ostinato_int8", 1.0) for section in ("engine", "first_token")
    ]


def test_cached_prompts_are_computed_once(
    tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_texts_take(monkeypatch, lambda tokens: 0.25 + 1e-3 * tokens)
    sent: list[list[list[int]]] = []
    generate = Engine.generate

    def kept(self: Engine, prompts: Any, params: SamplingParams) -> Any:
        sent.append(prompts)
        return generate(self, prompts, params)

    monkeypatch.setattr(Engine, "generate", kept)
    file = tmp_path / "engine.json"
    sizes = "--batch 3 2 --prompt 1040 --output 2 6 --repeats 2 --cached-prompts"
    flags = ["--json", str(file), "--device", str(device)]
    assert main(["bench", "engine", "--shape", "tiny", *sizes.split(), *flags]) == 0
    rows = json.loads(file.read_text())["rows"]
    assert [row["section"] for row in rows] == ["startup", "engine", "engine"]
    assert [row["case"] for row in rows[1:]] == [
        "tiny b2 prompt1040 cached",
        "tiny b3 prompt1040 cached",
    ]
    assert [row["pages"] for row in rows[1:]] == [3 * -(-1046 // 16)] * 2
    assert [len(prompts) for prompts in sent] == [2] * 6 + [3] * 6
    assert all(prompts == sent[-1][: len(prompts)] for prompts in sent)
    assert len(set(map(tuple, sent[-1]))) == 3


def test_prompts_that_no_cache_keeps_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = "--batch 2 --prompt 16 --output 2 6 --repeats 1 --cached-prompts --device cpu"
    assert main(["bench", "engine", "--shape", "tiny", *sizes.split()]) == 2
    error = "tiny b2 prompt16: 0 of 30 tokens of prompts were found in the KV cache"
    assert error in capsys.readouterr().err


def test_a_cache_of_a_size_says_its_pages_and_preemptions(
    tmp_path: Path, device: torch.device, capsys: pytest.CaptureFixture[str]
) -> None:
    # 36 pages of 16 tokens in bf16, twice as many in FP8: of 8 requests 24 tokens grow to 74.
    gib = 36 * 2 * 2 * 16 * 2 * 16 * 2 / 2**30
    file = tmp_path / "engine.json"
    sizes = f"--batch 8 --prompt 24 --output 2 50 --repeats 1 --cache-gib {gib:.12f}"
    flags = ["--kv-cache-dtype", "bf16", "fp8", "--kv-scales", "static", "--json", str(file)]
    argv = ["bench", "engine", "--shape", "tiny", *sizes.split(), *flags]
    assert main([*argv, "--device", str(device)]) == 0
    of_16, of_8 = (
        row for row in json.loads(file.read_text())["rows"] if row["section"] == "engine"
    )
    assert of_16["case"] == f"tiny b8 prompt24 {gib:g}GiB"
    assert of_8["pages"] == 2 * of_16["pages"] == 72
    assert of_16["preemptions"] > 0
    assert of_8["preemptions"] == 0
    assert f"36 pages, {of_16['preemptions']} preemptions" in capsys.readouterr().out


def test_texts_whose_length_does_not_show_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    let_texts_take(monkeypatch, lambda tokens: 0.25 - 1e-3 * tokens)
    flags = ["--batch", "1", "--prompt", "8", "--output", "2", "6", "--page-size", "4"]
    file = tmp_path / "engine.json"
    flags += ["--device", "cpu", "--json", str(file)]
    assert main(["bench", "engine", "--shape", "tiny", *flags]) == 2
    assert "texts of 2 and 6 tokens took 248.000 ms and 244.000 ms" in capsys.readouterr().err
    assert [row["section"] for row in json.loads(file.read_text())["rows"]] == ["startup"]


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
        ("--shape tiny --cache-gib 0", "cache_gib: got 0.0, expected a number above 0"),
        ("--shape tiny --cache-gib 1 --cached-prompts", "all cached prompts must fit"),
        (
            "--shape tiny --kv-cache-dtype fp8 int8 --kv-scales static",
            "but the checkpoint has no scales of an INT8 cache",
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
