"""A picture of one decode step: which kernel ran when, and which beside which."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .breakdown import ATTENTION, Span

_LEGEND = 14  # entries; what takes least is "others"


def draw_timeline(path: Path, title: str, run: Sequence[Span], sites: Sequence[str]) -> None:
    """Draw a step as two rows of bars: the whole of it, and one layer in its middle.

    Kernels that overlap, as they do with programmatic launches, lie in lanes below each other.

    Args:
        path: of the picture; its suffix (.svg, .png, .pdf) says the format.
        title: above it.
        run: the step's kernels and copies, in the order of their starts.
        sites: what each does, which gives it its colour.

    Raises:
        ImportError: without matplotlib.
        ValueError: for nothing to draw, or an unknown format.
        OSError: when the picture cannot be written.
    """
    from matplotlib.figure import Figure

    if not run:
        raise ValueError("run: got no kernels, expected those of a step")
    start = run[0].begin
    colours = _colours(run, sites)
    figure = Figure(figsize=(14, 6), layout="constrained")
    whole, layer = figure.subplots(2, 1)
    figure.suptitle(title)
    for axes, (first, last) in ((whole, (0, len(run))), (layer, _middle_layer(sites))):
        _bars(axes, run[first:last], sites[first:last], start, colours)
        begin, end = run[first].begin - start, max(span.end for span in run[first:last]) - start
        axes.set_xlim(begin, end)
        axes.set_xlabel(f"µs; kernels {first + 1} to {last} of {len(run)}")
    handles, labels = whole.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", fontsize="small")
    figure.savefig(path)


def lanes_of(run: Sequence[Span]) -> list[int]:
    """Return the lowest lane that is free when each kernel starts."""
    ends: list[float] = []
    lanes = []
    for span in run:
        lane = next((lane for lane, end in enumerate(ends) if end <= span.begin), len(ends))
        ends[lane : lane + 1] = [span.end]
        lanes.append(lane)
    return lanes


def _middle_layer(sites: Sequence[str]) -> tuple[int, int]:
    """Return the kernels from one attention to the next, in the middle of the step."""
    attentions = [index for index, site in enumerate(sites) if site == ATTENTION]
    if len(attentions) < 2:
        return 0, len(sites)
    middle = (len(attentions) - 1) // 2
    return attentions[middle], attentions[middle + 1] + 1


def _colours(run: Sequence[Span], sites: Sequence[str]) -> dict[str, Any]:
    """Return a colour for each site that takes long, in the order of their first launches."""
    from matplotlib import color_sequences

    times: dict[str, float] = {}
    for span, site in zip(run, sites, strict=True):
        times[site] = times.get(site, 0.0) + span.end - span.begin
    longest = set(sorted(times, key=lambda site: -times[site])[:_LEGEND])
    palette = color_sequences["tab20"]
    named = [site for site in times if site in longest]
    return {site: palette[index % len(palette)] for index, site in enumerate(named)}


def _bars(
    axes: Any, run: Sequence[Span], sites: Sequence[str], start: float, colours: dict[str, Any]
) -> None:
    bars: dict[str, list[tuple[float, float, int]]] = {site: [] for site in [*colours, "others"]}
    for span, site, lane in zip(run, sites, lanes_of(run), strict=True):
        site = site if site in colours else "others"
        bars[site].append((span.begin - start, span.end - span.begin, lane))
    for site, drawn in bars.items():
        if drawn:
            begins, widths, lanes = zip(*drawn, strict=True)
            colour = colours.get(site, "lightgrey")
            axes.barh(lanes, widths, left=begins, height=0.9, color=colour, label=site)
    axes.invert_yaxis()
    axes.set_yticks([])
