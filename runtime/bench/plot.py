"""A picture of a benchmark's rows: a dot for each time, a line for each case."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

_MARKERS = "os^Dv<>p*h"
_WIDE = 5  # an axis is logarithmic if its largest value is more than so many times the smallest
_LINE_INCHES = 0.24  # of height, for each case
_FRAME_INCHES = 1.1  # of height, for each panel's title and axis


@dataclass(frozen=True)
class Dot:
    """One value of a picture.

    Args:
        panel: what the value is, with its unit; dots of one panel share an axis.
        case: the line that it lies on.
        series: whose value, which gives the dot its colour and its marker.
        value: the number.
    """

    panel: str
    case: str
    series: str
    value: float


@runtime_checkable
class Plotted(Protocol):
    """A row that has values for a picture."""

    def dots(self) -> Sequence[Dot]:
        """Return the values of the row."""


def draw_rows(path: Path, title: str, rows: Iterable[object]) -> None:
    """Draw the rows that are `Plotted` as an SVG picture, one panel below the other.

    Cases and series keep the order of their first rows. The axis of a panel is logarithmic where
    its values are positive and far apart. The same rows make the same file.

    Raises:
        ImportError: without matplotlib.
        ValueError: when no row is `Plotted`.
        OSError: when the picture cannot be written.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    dots = [dot for row in rows if isinstance(row, Plotted) for dot in row.dots()]
    if not dots:
        raise ValueError("rows: got none with a value, expected at least one")
    panels = _grouped(dots)
    looks = _looks(dots)
    heights = [
        _FRAME_INCHES + _LINE_INCHES * len({dot.case for dot in panel}) for panel in panels.values()
    ]
    figure = Figure(figsize=(10, sum(heights) + 0.5), layout="constrained")
    figure.suptitle(title)
    all_axes = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axes, (name, panel) in zip(all_axes, panels.items(), strict=True):
        _draw_panel(axes, name, panel, looks)
    with mpl.rc_context({"svg.hashsalt": "ostinato", "svg.fonttype": "none"}):
        figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})


def _grouped(dots: Sequence[Dot]) -> dict[str, list[Dot]]:
    panels: dict[str, list[Dot]] = {}
    for dot in dots:
        panels.setdefault(dot.panel, []).append(dot)
    return panels


def _looks(dots: Sequence[Dot]) -> dict[str, dict[str, Any]]:
    """Return the colour and the marker of every series."""
    from matplotlib import color_sequences

    palette = color_sequences["tab10"]
    return {
        series: {
            "color": palette[index % len(palette)],
            # Another marker once all colours are taken, so that no two series look the same.
            "marker": _MARKERS[index // len(palette) % len(_MARKERS)],
        }
        for index, series in enumerate(dict.fromkeys(dot.series for dot in dots))
    }


def _draw_panel(
    axes: Any, name: str, panel: Sequence[Dot], looks: dict[str, dict[str, Any]]
) -> None:
    cases = list(dict.fromkeys(dot.case for dot in panel))
    for series in dict.fromkeys(dot.series for dot in panel):
        own = [dot for dot in panel if dot.series == series]
        lines = [cases.index(dot.case) for dot in own]
        axes.plot([dot.value for dot in own], lines, linestyle="", label=series, **looks[series])
    values = [dot.value for dot in panel]
    if min(values) > 0 and max(values) > _WIDE * min(values):
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:g}")
    axes.set_yticks(range(len(cases)), cases)
    axes.set_ylim(len(cases) - 0.5, -0.5)  # the first case on top
    axes.set_xlabel(name)
    axes.grid(axis="x", which="both", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize="small", frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
