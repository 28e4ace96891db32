"""Draws the pictures of README and docs from the files of results.

    python docs/pictures/draw.py [FOLDER]

Writes `engine_h100.svg` into FOLDER, by default the one of this file. Needs matplotlib.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

HERE = Path(__file__).parent
ENGINE = HERE.parent / "results" / "h100" / "engine_vllm033.json"
BATCHES = (1, 8, 32, 128, 256)
BARS = (
    ("vllm_{}", "vLLM 0.33.0, 16-bit output projection", "#9aa5b1"),
    ("ostinato_{}", "Ostinato, 16-bit output projection", "#1f6feb"),
    ("ostinato_{0}_lm_head_{0}", "Ostinato, 8-bit output projection", "#8fbcff"),
)


def step_times(results: Path) -> dict[tuple[str, int], int]:
    """Return the µs of a decode step by implementation and batch."""
    rows = json.loads(results.read_text(encoding="utf-8"))["rows"]
    return {
        (row["impl"], int(row["case"].split()[1].removeprefix("b"))): row["us"]
        for row in rows
        if row["section"] == "engine"
    }


def draw_engine(path: Path) -> None:
    """Draw the step times of both engines as bars, INT8 beside FP8."""
    times = step_times(ENGINE)
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    for axes, dtype in zip(figure.subplots(1, 2, sharey=True), ("int8", "fp8"), strict=True):
        for index, (impl, label, colour) in enumerate(BARS):
            shown = [(n, times.get((impl.format(dtype), batch))) for n, batch in enumerate(BATCHES)]
            known = [(n + (index - 1) * 0.27, us / 1000) for n, us in shown if us is not None]
            axes.bar(*zip(*known, strict=True), width=0.25, color=colour, label=label)
        axes.set_title(f"Llama-3.1-8B, {dtype.upper()}, H100 80GB")
        axes.set_xticks(range(len(BATCHES)), [str(batch) for batch in BATCHES])
        axes.set_xlabel("batch")
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].set_ylabel("ms per decode step")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    save(figure, path)


def save(figure: Figure, path: Path) -> None:
    """Write a figure as the same file each time: no date, no random names."""
    with mpl.rc_context({"svg.hashsalt": "ostinato", "svg.fonttype": "none"}):
        figure.savefig(path, metadata={"Date": None, "Creator": None})


if __name__ == "__main__":
    draw_engine(Path(sys.argv[1] if len(sys.argv) > 1 else HERE) / "engine_h100.svg")
