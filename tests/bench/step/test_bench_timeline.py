"""The picture of a step: lanes of what overlaps, and a file of the format asked for."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato.bench.step.breakdown import ATTENTION, Span
from ostinato.bench.step.timeline import draw_timeline, lanes_of

TIMES = st.lists(st.tuples(st.floats(0, 100), st.floats(0.01, 50)), max_size=40)


@given(TIMES)
def test_no_lane_has_overlapping_kernels_or_is_needless(
    times: list[tuple[float, float]],
) -> None:
    run = sorted(
        (Span(begin, begin + length, "k") for begin, length in times), key=lambda s: s.begin
    )
    lanes = lanes_of(run)
    for index, (span, lane) in enumerate(zip(run, lanes, strict=True)):
        at_once = [
            other for other, end in zip(lanes, run[:index], strict=False) if end.end > span.begin
        ]
        assert lane not in at_once
        assert set(range(lane)) <= set(at_once)


@pytest.mark.parametrize(("suffix", "head"), [("svg", b"<?xml"), ("png", b"\x89PNG")])
def test_a_step_is_drawn(tmp_path: Path, suffix: str, head: bytes) -> None:
    sites = ["memcpy (qkv)", *["qkv", ATTENTION, "o", "gate_up", "down"] * 3, "lm_head"]
    run = [Span(10.0 * i, 10.0 * i + 12.5, site) for i, site in enumerate(sites)]
    file = tmp_path / f"step.{suffix}"
    draw_timeline(file, "a step", run, sites)
    data = file.read_bytes()
    assert data.startswith(head)
    if suffix == "svg":
        assert all(
            f"<!-- {text} -->".encode() in data for text in ("a step", "attention", "lm_head")
        )


def test_more_sites_than_colours_are_others(tmp_path: Path) -> None:
    run = [Span(float(i), float(i + 1), f"k{i}") for i in range(30)]
    draw_timeline(tmp_path / "a.svg", "", run, [span.name for span in run])
    assert b"<!-- others -->" in (tmp_path / "a.svg").read_bytes()


def test_nothing_and_unknown_formats_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="run: got no kernels"):
        draw_timeline(tmp_path / "a.svg", "", [], [])
    with pytest.raises(ValueError, match="xyz"):
        draw_timeline(tmp_path / "a.xyz", "", [Span(0.0, 1.0, "k")], ["k"])
