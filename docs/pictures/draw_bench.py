"""Draws the pictures that `bench … --plot` makes, of committed documents.

    python docs/pictures/draw_bench.py [FOLDER]

Writes them into FOLDER, by default the one of this file. Needs matplotlib.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

from draw import HERE
from ostinato.bench.cpu.speed import SpeedRow
from ostinato.bench.graphs.burst import BurstRow
from ostinato.bench.graphs.run import Figure
from ostinato.bench.plot import draw_rows
from ostinato.bench.step.run import StepRow

RESULTS = HERE.parent / "results"
# By picture: the section, the documents, and the class of their rows.
PICTURES: dict[str, tuple[str, list[str], Callable[..., object]]] = {
    "bench_step.svg": ("step", ["h200/step.json"], StepRow),
    "bench_graphs.svg": ("graphs", ["h200/graphs.json"], Figure),
    "bench_burst.svg": ("burst", ["h200/burst.json"], BurstRow),
    "bench_cpu.svg": ("cpu", ["cpu/bf16.json", "cpu/fp32_int8.json"], SpeedRow),
}


def draw_bench(path: Path) -> None:
    """Draw one of `PICTURES`."""
    section, names, row = PICTURES[path.name]
    documents = [json.loads((RESULTS / name).read_text(encoding="utf-8")) for name in names]
    rows = [
        row(**fields)
        for document in documents
        for fields in document["rows"]
        if fields["section"] == section
    ]
    draw_rows(path, f"bench {section}, {documents[0]['gpu']}", rows)


if __name__ == "__main__":
    for picture in PICTURES:
        draw_bench(Path(sys.argv[1] if len(sys.argv) > 1 else HERE) / picture)
