"""Draws the pictures of README and docs from the files of results.

    python docs/pictures/draw.py [FOLDER]

Writes `engine_h200.svg` into FOLDER, by default the one of this file. Needs matplotlib.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

HERE = Path(__file__).parent
ENGINE = HERE.parent / "results" / "h200" / "side_by_side.json"
BATCHES = (1, 8, 32, 128, 256)
FORMATS = {"bf16": "bf16", "int8": "INT8", "fp8": "FP8", "fp8-block": "FP8 in blocks of 128"}
BARS = (
    ("vllm", "vLLM 0.33.0", "#9aa5b1"),
    ("ostinato", "Ostinato", "#1f6feb"),
)


def step_times(results: Path) -> dict[tuple[str, str, int], float]:
    """Return the µs of a decode step by engine, format and batch."""
    rows = json.loads(results.read_text(encoding="utf-8"))["rows"]
    return {
        (row["impl"].split("_")[0], row["dtype"], int(row["case"].split()[1][1:])): row["us"]
        for row in rows
        if row["section"] == "step"
    }


def draw_engine(path: Path) -> None:
    """Draw the step times of both engines as bars, a panel for each format."""
    times = step_times(ENGINE)
    figure = Figure(figsize=(10, 3.2), layout="constrained")
    panels = figure.subplots(1, len(FORMATS), sharey=True)
    for axes, (dtype, title) in zip(panels, FORMATS.items(), strict=True):
        for index, (engine, label, colour) in enumerate(BARS):
            heights = [times[engine, dtype, batch] / 1000 for batch in BATCHES]
            places = [n + (index - 0.5) * 0.42 for n in range(len(BATCHES))]
            axes.bar(places, heights, width=0.4, color=colour, label=label)
        axes.set_title(title)
        axes.set_xticks(range(len(BATCHES)), [str(batch) for batch in BATCHES])
        axes.set_xlabel("batch")
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("ms per decode step")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(BARS), frameon=False)
    save(figure, path)


def save(figure: Figure, path: Path) -> None:
    """Write a figure as the same file each time: no date, no random names."""
    with mpl.rc_context({"svg.hashsalt": "ostinato", "svg.fonttype": "none"}):
        figure.savefig(path, metadata={"Date": None, "Creator": None})


if __name__ == "__main__":
    draw_engine(Path(sys.argv[1] if len(sys.argv) > 1 else HERE) / "engine_h200.svg")
