"""Draws the pictures of docs/kernels from the files of results.

    python docs/pictures/draw_kernels.py [FOLDER]

Writes `kernel_decode.svg`, `kernel_prefill.svg` and `kernel_gemm.svg` into FOLDER, by default the
one of this file. Needs matplotlib.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from draw import HERE, save

RESULTS = HERE.parent / "results" / "h200"
READING = 4.5  # TB/s, at which an H200 reads weights (docs/notebooks/gemm_tiled.md)
BLUE, GREYS = "#1f6feb", ("#9aa5b1", "#5c6773")
Rows = dict[tuple[str, str], dict[str, float]]  # by case and implementation


def rows_of(name: str) -> Rows:
    """Return the rows of a file of results by case and implementation."""
    document = json.loads((RESULTS / name).read_text(encoding="utf-8"))
    return {(row["case"], row["impl"]): row for row in document["rows"]}


def draw_decode(path: Path) -> None:
    """Draw the speed of reading the cache by tokens, a line for each batch."""
    rows, lengths = rows_of("decode.json"), (512, 2048, 8192, 32768)
    figure, axes = _figure("paged decode attention, 32/8 heads of 128, bf16, H200")
    for index, batch in enumerate((1, 8, 32, 128, 256)):
        cases = {n: (f"32/8 b{batch} kv{n}", "ostinato_p16") for n in lengths}
        known = {n: rows[case]["tb_s"] for n, case in cases.items() if case in rows}
        axes.plot(*_points(known), "o-", color=BLUE, alpha=0.28 + 0.18 * index, label=str(batch))
    axes.axhline(READING, color=GREYS[1], linestyle="--", label=f"{READING} TB/s")
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, map(str, lengths))
    axes.set_xlabel("tokens of each sequence")
    axes.set_ylabel("TB/s")
    _finish(figure, axes, path, "batch")


def draw_prefill(path: Path) -> None:
    """Draw TFLOP/s of prompts' attention as bars, ours beside two peers."""
    rows, cases = rows_of("prefill.json"), ("16x1024", "4x4096", "1x16384", "1x32768")
    impls = {"ostinato_bf16": BLUE, "fa3_dense": GREYS[0], "cudnn": GREYS[1]}
    labels = {"ostinato_bf16": "Ostinato", "fa3_dense": "FlashAttention-3", "cudnn": "cuDNN"}
    figure, axes = _figure("attention of prompts, causal, 32/8 heads of 128, bf16, H200")
    for index, (impl, colour) in enumerate(impls.items()):
        known = {n: rows[case, impl] for n, case in enumerate(cases) if (case, impl) in rows}
        places = [n + (index - 1) * 0.27 for n in known]
        rates = [row["tflop_s"] for row in known.values()]
        axes.bar(places, rates, width=0.25, color=colour, label=labels[impl])
    axes.set_xticks(range(len(cases)), cases)
    axes.set_xlabel("prompts x tokens")
    axes.set_ylabel("TFLOP/s")
    _finish(figure, axes, path, None)


def draw_gemm(path: Path) -> None:
    """Draw the time of one product by tokens, ours beside a peer and the reading of weights."""
    rows, n, k = rows_of("gemm.json"), 4096, 14336
    tokens = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 4096, 8192)
    impls = {"ostinato_int8": BLUE, "sgl_i8": GREYS[0]}
    labels = {"ostinato_int8": "Ostinato", "sgl_i8": "SGLang"}
    figure, axes = _figure(f"W8A8 INT8 product, {n} x {k} weights, H200")
    for impl, colour in impls.items():
        cases = {m: (f"N{n} K{k} M{m}", impl) for m in tokens}
        known = {m: rows[case]["us"] for m, case in cases.items() if case in rows}
        axes.plot(*_points(known), "o-", color=colour, label=labels[impl])
    read = n * k / READING / 1e6
    axes.axhline(read, color=GREYS[1], linestyle="--", label="weights read once")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    shown, times = (1, 8, 32, 128, 512, 8192), (10, 20, 50, 100, 200, 500)
    axes.set_xticks(shown, map(str, shown))
    axes.set_yticks(times, map(str, times))
    axes.minorticks_off()
    axes.set_xlabel("tokens")
    axes.set_ylabel("µs")
    _finish(figure, axes, path, None)


def _figure(title: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(8, 3.6), layout="constrained")
    axes = figure.subplots()
    axes.set_title(title)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _points(known: dict[int, float]) -> tuple[list[int], list[float]]:
    return list(known), list(known.values())


def _finish(figure: Figure, axes: Axes, path: Path, title: str | None) -> None:
    axes.legend(title=title, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    save(figure, path)


PICTURES = {
    "kernel_decode.svg": draw_decode,
    "kernel_prefill.svg": draw_prefill,
    "kernel_gemm.svg": draw_gemm,
}

if __name__ == "__main__":
    for name, draw_picture in PICTURES.items():
        draw_picture(Path(sys.argv[1] if len(sys.argv) > 1 else HERE) / name)
