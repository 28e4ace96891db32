"""`bench graphs`: what it needs, what it measures, and how it says so."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ostinato.bench.gemm.cases import SHAPE_GROUPS, Shape
from ostinato.bench.graphs.run import MANY_BATCH_SIZES, PADDED, Figure, falls_in_one_tile
from ostinato.bench.graphs.subjects import Subject, hugging_face_step, our_step
from ostinato.bench.report import Report
from ostinato.cli.main import main
from ostinato.compat.transformers import replace_attention, replace_norms
from ostinato.graphs import GraphRunner, Misses, Variant, VerificationError
from ostinato.ops.linear.tile_table import Choice, choose

CPU = torch.device("cpu")


def test_the_batch_sizes_are_those_of_serving_engines() -> None:
    assert len(MANY_BATCH_SIZES) == 35
    assert MANY_BATCH_SIZES[-1] == 256
    assert all(n <= bucket < 2 * n for n, bucket, _ in PADDED)


@pytest.mark.parametrize(("rows", "bucket", "one_tile"), PADDED)
def test_rows_and_buckets_have_as_many_tiles_where_it_is_said(
    rows: int, bucket: int, one_tile: bool
) -> None:
    def cut(m: int, shape: Shape) -> tuple[Choice, int]:
        how = {"packed": True, "fast_accum": True, "batch_invariant": True}
        choice = choose(m, shape.n, shape.k, "int8", "bf16", **how)
        tiles = math.ceil(m / choice.tile_tokens) if choice.tile_tokens else 1
        return dataclasses.replace(choice, tile_tokens=0), tiles

    shapes = SHAPE_GROUPS["llama-8b"]
    assert one_tile == all(cut(rows, shape) == cut(bucket, shape) for shape in shapes)


def test_a_figure_says_whether_its_target_is_reached() -> None:
    assert str(Figure("case", "s", 1.5, 2.0)).endswith("1.5  (at most 2: reached)")
    assert str(Figure("case", "s", 2.5, 2.0)).endswith("2.5  (at most 2: MISSED)")
    assert str(Figure("case", "s", 2.5)).endswith("2.5")


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["--device", "cpu"], "a CPU has no graphs to measure"),
        (["--max-batch", "0"], "--max-batch: got 0"),
        (["--context", "0"], "--context: got 0"),
        (["--shape", "gpt"], "invalid choice: 'gpt'"),
        (["--json", "/nowhere/x.json"], "--json"),
    ],
)
def test_bad_arguments(
    arguments: list[str], match: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main(["bench", "graphs", *arguments])
    except SystemExit as error:
        code = int(error.code or 0)
    assert code == 2
    assert match in capsys.readouterr().err


@pytest.mark.parametrize("make", ["ours", "ostinato", "sdpa"])
def test_all_steps_are_captured_verified_and_run(make: Any) -> None:
    sizes = {"max_batch": 8, "context": 24}
    if make == "ours":
        subject = our_step("tiny", "bf16", CPU, **sizes)
    else:
        subject = hugging_face_step("tiny", CPU, attention=make, **sizes)
    with GraphRunner(subject.step, subject.buffers, memory=subject.memory) as runner:
        with subject.capture_examples():
            report = runner.capture({Variant(): [1, 3], Variant(name="bucket"): [4]})
        assert {graph.verdict for graph in report.graphs} == {"bit-equal"}
        exact = runner.run(3, subject.inputs(3))["tokens"].clone()
        padded = runner.run(3, subject.inputs(3), variant=Variant(name="bucket"))["tokens"]
        assert torch.equal(exact, padded)
        runner.check_memory()


def cache_of(subject: Subject) -> torch.Tensor:
    """Return keys and values of a step of transformers."""
    cache: Any = subject.memory["cache"]
    return cache if isinstance(cache, torch.Tensor) else cache[0]


def test_transformers_steps_of_both_attentions_agree() -> None:
    logits = []
    for attention in ("ostinato", "sdpa"):
        torch.manual_seed(0)
        subject = hugging_face_step("tiny", CPU, max_batch=4, context=24, attention=attention)
        storage = cache_of(subject)
        with GraphRunner(subject.step, subject.buffers) as runner:
            runner.capture([4], verify=False)
            storage.normal_(generator=torch.Generator().manual_seed(1))
            logits.append(runner.run(3, subject.inputs(3))["logits"].clone())
        assert not storage.isnan().any()
    ours, theirs = (each.float() for each in logits)
    assert (ours - theirs).norm() < 2e-2 * theirs.norm()


@pytest.mark.parametrize("attention", ["ostinato", "sdpa"])
def test_norms_and_rope_are_ours_where_attention_is(attention: Any) -> None:
    subject = hugging_face_step("tiny", CPU, max_batch=2, context=8, attention=attention)
    model: Any = subject.memory["weights"]
    for replace in (replace_norms, replace_attention):
        assert (replace(model) == []) == (attention == "ostinato")


@pytest.mark.parametrize("attention", ["ostinato", "sdpa"])
def test_padding_changes_nothing_that_transformers_rows_read(attention: Any) -> None:
    subject = hugging_face_step("tiny", CPU, max_batch=4, context=24, attention=attention)
    cache_of(subject).normal_()  # as if another batch size had left it
    inputs, batch = subject.inputs(3), subject.buffers.view(4)

    def logits() -> torch.Tensor:
        subject.buffers.stage(inputs, 3, 4)
        outputs: Any = subject.step(batch)
        return outputs["logits"][:3].clone()

    with torch.no_grad():
        expected = logits()
        subject.buffers.stage_padding(4)
        subject.step(batch)
        assert torch.equal(logits(), expected)


def test_shared_tiles_of_padding_follow_from_the_kernels() -> None:
    subjects = [
        hugging_face_step("tiny", CPU, max_batch=2, context=8, attention=attention)
        for attention in ("ostinato", "sdpa")
    ]
    assert [subject.tiles for subject in subjects] == ["library", "rows"]
    assert subjects[1].name == "transformers_sdpa tiny bf16 ctx8"
    ours = our_step("tiny", "bf16", CPU, max_batch=2, context=8)
    assert ours.tiles == "ours"


@pytest.mark.parametrize(
    ("tiles", "ours", "padded", "expected"),
    [
        ("ours", True, {"other": 3}, True),
        ("ours", False, {"gemm": 2, "norm": 1}, False),
        ("library", False, {"norm": 1, "gemm": 2}, True),
        ("library", True, {"gemm": 1, "wider_gemm": 1, "norm": 1}, False),
        ("library", True, {"gemm": 3, "norm": 1}, False),
        ("library", True, None, False),
        ("rows", True, {"gemm": 2, "norm": 1}, False),
    ],
)
def test_padding_meets_the_target_where_both_are_in_one_tile(
    tiles: Any, ours: bool, padded: Any, expected: bool
) -> None:
    assert falls_in_one_tile(tiles, ours, {"gemm": 2, "norm": 1}, padded) == expected


def test_another_depth_of_the_model_is_said_in_the_name() -> None:
    subject = hugging_face_step("tiny", CPU, max_batch=2, context=8, num_layers=1)
    assert subject.name == "transformers tiny bf16 ctx8, 1 layers"
    with GraphRunner(subject.step, subject.buffers) as runner:
        runner.capture([2], misses=Misses("eager"))
        assert runner.run(1, subject.inputs(1))["tokens"].shape == (1,)


def test_a_refused_step_is_one_line_and_costs_no_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(_subject: object) -> Iterator[Figure]:
        yield Figure("a step", "s", 1.0)
        raise VerificationError("batch size 8 with 8 real rows: the replay differs")

    report = Report.for_device(CPU)
    monkeypatch.setattr("ostinato.cli.bench.graphs.resolve_device", lambda _: torch.device("cuda"))
    monkeypatch.setattr(Report, "for_device", lambda _: report)
    monkeypatch.setattr("ostinato.bench.graphs.subjects.our_step", lambda *_, **__: None)
    monkeypatch.setattr("ostinato.bench.graphs.run.measure", measure)
    file = tmp_path / "graphs.json"
    assert main(["bench", "graphs", "--json", str(file)]) == 1
    printed = capsys.readouterr()
    assert printed.err == (
        "ostinato bench: error: batch size 8 with 8 real rows: the replay differs\n"
    )
    assert [row["value"] for row in json.loads(file.read_text())["rows"]] == [1.0]


@pytest.mark.gpu
def test_everything_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "graphs.json"
    flags = ["--shape", "tiny", "--max-batch", "16", "--context", "32", "--json", str(file)]
    steps = ["ostinato", "transformers", "transformers_sdpa"]
    assert main(["bench", "graphs", "--step", *steps, *flags]) == 0
    rows = json.loads(file.read_text())["rows"]
    assert {row["section"] for row in rows} == {"graphs"}
    names = ("tiny int8 ctx32", *(f"{step} tiny bf16 ctx32" for step in steps[1:]))
    for name in names:
        figures = [row["figure"] for row in rows if row["case"].startswith(name)]
        for figure in ("all after warm-up, s", "padded against exact", "audit, s"):
            assert figure in figures
    assert all(row["value"] == 0 for row in rows if "allocator calls" in row["figure"])
    assert capsys.readouterr().out.count("\n") == len(rows) + 1
