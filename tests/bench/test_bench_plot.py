"""The picture of a benchmark's rows: what it shows, and that it is the same for the same rows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ostinato.bench.cpu.agreement import AgreementRow
from ostinato.bench.cpu.speed import SpeedRow
from ostinato.bench.graphs.burst import BurstRow
from ostinato.bench.graphs.run import Figure
from ostinato.bench.plot import Dot, draw_rows
from ostinato.bench.report import Row


def row(case: str, impl: str, us: float) -> Row:
    return Row("gemm", case, impl, us=us, tb_s=1.0, tflop_s=1.0)


def texts(path: Path) -> list[str]:
    """Return the texts of a picture in the order of the file."""
    return re.findall(r"<text [^>]*>([^<]*)</text>", path.read_text(encoding="utf-8"))


def test_cases_and_series_are_named_once_in_order(tmp_path: Path) -> None:
    file = tmp_path / "a.svg"
    rows = [row(case, impl, 3.0) for case in ("z1", "a2") for impl in ("ours", "bf16")]
    draw_rows(file, "the title", rows)
    found = texts(file)
    assert [text for text in found if text in {"z1", "a2"}] == ["z1", "a2"]
    assert [text for text in found if text in {"ours", "bf16"}] == ["ours", "bf16"]
    assert {"the title", "gemm, µs"} <= set(found)


def test_the_same_rows_make_the_same_file(tmp_path: Path) -> None:
    for name in ("a.svg", "b.svg"):
        draw_rows(tmp_path / name, "t", [row("one", "x", 1.0), row("two", "x", 9.0)])
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


@pytest.mark.parametrize(("largest", "is_log"), [(2.0, False), (1000.0, True)])
def test_values_far_apart_have_a_logarithmic_axis(
    largest: float, is_log: bool, tmp_path: Path
) -> None:
    draw_rows(tmp_path / "a.svg", "t", [row("one", "x", 1.0), row("two", "x", largest)])
    ticks = set(texts(tmp_path / "a.svg"))
    assert ({"1", "10", "100", "1000"} <= ticks) == is_log


def test_values_of_zero_are_drawn(tmp_path: Path) -> None:
    figures = [Figure("one", "allocator calls per run", 0.0), Figure("two", "pool, MiB", 8.0)]
    draw_rows(tmp_path / "a.svg", "t", figures)
    assert {"count or ratio", "MiB"} <= set(texts(tmp_path / "a.svg"))


def test_rows_without_values_are_left_out(tmp_path: Path) -> None:
    draw_rows(tmp_path / "a.svg", "t", [{"section": "gemm", "us": 1.0}, row("one", "x", 1.0)])
    with pytest.raises(ValueError, match="rows: got none with a value, expected at least one"):
        draw_rows(tmp_path / "b.svg", "t", [{"section": "gemm", "us": 1.0}])
    assert not (tmp_path / "b.svg").exists()


def test_more_series_than_colours_differ(tmp_path: Path) -> None:
    from ostinato.bench.plot import _looks

    looks = _looks([Dot("p", "c", f"s{index}", 1.0) for index in range(30)])
    assert len({(look["color"], look["marker"]) for look in looks.values()}) == 30


def test_units_of_figures_are_their_panels() -> None:
    figures = ["run() on the host, p50, µs, inputs on the host", "warm-up, s", "pool, MiB", "x"]
    panels = [dot.panel for name in figures for dot in Figure("c", name, 1.0).dots()]
    assert panels == ["µs", "s", "MiB", "count or ratio"]


def test_rows_of_other_benchmarks_have_their_values() -> None:
    speed = SpeedRow("b1 decode", "ours", 1.0, "theirs", 2.0, 0.5, threads=1, repeats=1)
    assert [(dot.series, dot.value) for dot in speed.dots()] == [("ours", 1.0), ("theirs", 2.0)]
    burst = BurstRow("burst", "c", "stepping", "idle", us_mean=3.0, us_p50=2.0, us_p99=4.0)
    assert burst.dots() == [Dot("mean of a step, µs", "c", "stepping, host idle", 3.0)]
    answers = AgreementRow("2 prompts", "ours", 7.5, [7, 8])
    assert answers.dots() == [Dot("common prefix, tokens", "2 prompts", "ours", 7.5)]
