"""What a capture cost, per batch size, as a table and as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class GraphReport:
    """One captured batch size. Everything is measured; None where it was not or does not apply.

    Attributes:
        batch_size: rows.
        warmup_ms: of the calls before any capture, compilation and autotuning included.
        capture_ms: recording and instantiating.
        verify_ms: comparing replays with the step.
        pool_mib: growth of the graphs' memory pool, in MiB. Graphs share the pool, so the sum over
            all of them is what they take, and a later graph that fits into it adds nothing.
        device_mib: fall of the driver's free memory, in MiB: the pool's growth and what the driver
            needs for the graph; other processes on the device disturb it.
        verdict: "not verified", or "bit-equal" and the buffers without example, which were verified
            as padding only.
    """

    batch_size: int
    warmup_ms: float
    capture_ms: float
    verify_ms: float | None
    pool_mib: float | None
    device_mib: float | None
    verdict: str


@dataclass(frozen=True)
class CaptureReport:
    """What `GraphRunner.capture` did.

    Attributes:
        device: its name.
        total_ms: wall-clock time of the whole capture.
        graphs: one per batch size, increasing.
    """

    device: str
    total_ms: float
    graphs: tuple[GraphReport, ...]

    def __str__(self) -> str:
        """Return a table."""
        count = len(self.graphs)
        sizes = "1 batch size" if count == 1 else f"{count} batch sizes"
        title = f"{sizes} captured on {self.device} in {self.total_ms:.1f} ms"
        if self.device == "cpu":
            title += " (without CUDA a replay calls the step)"
        header = ("batch", "warm-up ms", "capture ms", "verify ms", "pool MiB", "device MiB")
        lines = [" ".join(f"{text:>10}" for text in header) + "  verdict"]
        for graph in self.graphs:
            cells = (
                str(graph.batch_size),
                _number(graph.warmup_ms),
                _number(graph.capture_ms),
                _number(graph.verify_ms),
                _number(graph.pool_mib),
                _number(graph.device_mib),
            )
            lines.append(" ".join(f"{cell:>10}" for cell in cells) + f"  {graph.verdict}")
        return "\n".join([title, *lines])

    def to_json(self) -> str:
        """Return the same as a JSON object, keys as the attributes."""
        return json.dumps(asdict(self))


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
