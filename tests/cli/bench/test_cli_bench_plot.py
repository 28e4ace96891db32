"""`bench SECTION --plot`: every section draws its rows, and says early when it cannot."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ostinato.bench.graphs.run import Figure
from ostinato.cli.main import main

SHAPE = "--shape tiny"
SECTIONS = {
    "burst": SHAPE,
    "cpu": "--model examples/tiny-llama",
    "decode": "",
    "engine": SHAPE,
    "gemm": "",
    "graphs": SHAPE,
    "prefill": "",
    "step": SHAPE,
}
# Sections that measure something on a CPU, as small as they allow, and a text in the picture.
RUNS = {
    "burst": ("--shape tiny --steps 4 --repeats 2 --context 20 --device cpu", "burst, host idle"),
    "cpu": (
        "--model examples/tiny-llama --batch 1 --prompt 5 --repeats 1 --dtype fp32",
        "transformers_fp32",
    ),
    "decode": ("--heads 4/2 --batch 1 --kv 32 --page 16 --peer none --device cpu", "b1 kv32"),
    "engine": ("--shape tiny --prompt 4 --output 2 16 --repeats 1 --device cpu", "b1 prompt4"),
    "gemm": ("--shapes 16x32 --m 1 --dtype int8 --peer none --device cpu", "N16 K32 M1"),
    "prefill": ("--cases", "1x16"),
    "step": ("--shape tiny --context 16 --repeats 10 --device cpu", "ostinato_int8"),
}


def drawn(section: str, arguments: list[str], file: Path) -> str:
    assert main(["bench", section, *arguments, "--plot", str(file)]) == 0
    return file.read_text(encoding="utf-8")


@pytest.mark.parametrize("section", RUNS)
def test_rows_are_drawn(section: str, tmp_path: Path) -> None:
    text, shown = RUNS[section]
    arguments = text.split()
    if section == "prefill":
        arguments += ["1x16 h2/1 d64", "--peer", "none", "--device", "cpu"]
    picture = drawn(section, arguments, tmp_path / "a.svg")
    assert shown in picture
    assert f"bench {section}, " in picture


def test_figures_of_graphs_are_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def figures(subject: Any) -> Iterator[Figure]:
        yield Figure("35 graphs", "warm-up, s", 1.5)

    class Device:
        type = "cuda"

    monkeypatch.setattr("ostinato.cli.bench.graphs.resolve_device", lambda name: Device())
    monkeypatch.setattr("ostinato.bench.graphs.subjects.our_step", lambda *_, **__: None)
    monkeypatch.setattr("ostinato.bench.graphs.run.measure", figures)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "a card")
    monkeypatch.setattr("torch.cuda.empty_cache", lambda: None)
    picture = drawn("graphs", ["--shape", "tiny"], tmp_path / "a.svg")
    assert "35 graphs" in picture
    assert "bench graphs, a card, " in picture


@pytest.mark.parametrize("section", SECTIONS)
def test_a_missing_matplotlib_names_the_extra(
    section: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    find = importlib.util.find_spec

    def without(name: str, *rest: Any) -> Any:
        return None if name == "matplotlib" else find(name, *rest)

    monkeypatch.setattr("importlib.util.find_spec", without)
    flags = [*SECTIONS[section].split(), "--plot", str(tmp_path / "a.svg")]
    assert main(["bench", section, *flags]) == 2
    error = "--plot: matplotlib is not installed (pip install ostinato[plot])"
    assert error in capsys.readouterr().err


@pytest.mark.parametrize("section", SECTIONS)
@pytest.mark.parametrize(
    ("file", "error"),
    [
        ("a.png", "--plot: got a.png, expected a file that ends in .svg"),
        ("no-such-folder/a.svg", "--plot: no-such-folder is not a folder"),
    ],
)
def test_other_files_are_refused_before_the_run(
    section: str, file: str, error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", section, *SECTIONS[section].split(), "--plot", file]) == 2
    assert error in capsys.readouterr().err


def test_a_run_without_rows_draws_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = "--shapes 16x32 --m 1 --dtype int8 --device cpu --peer none --budget-s 0.000001"
    assert main(["bench", "gemm", *flags.split(), "--plot", str(tmp_path / "a.svg")]) == 2
    assert "rows: got none with a value" in capsys.readouterr().err
