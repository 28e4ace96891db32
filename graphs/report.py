"""What a capture cost and recorded, per batch size, as a table and as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from .graph_key import Key, Variant
from .inspect.audit import Finding, summarize
from .inspect.dot import short_name

_KERNELS_SHOWN = 12


@dataclass(frozen=True)
class GraphReport:
    """One captured batch size. Everything is measured; None where it was not or does not apply.

    Attributes:
        batch_size: rows.
        warmup_ms: of the calls before any capture, compilation and autotuning included.
        capture_ms: recording one call of the step.
        verify_ms: comparing replays with the step.
        pool_mib: growth of the graphs' memory pool, in MiB. Graphs share the pool, so the sum over
            all of them is what they take, and a later graph that fits into it adds nothing.
        device_mib: fall of the driver's free memory, in MiB: the pool's growth and what the driver
            needs for the graph; other processes on the device disturb it.
        verdict: "not verified", or "bit-equal" and the buffers without example, which were verified
            as padding only.
        instantiate_ms: making an executable graph of the nodes.
        audit_ms: reading the nodes and auditing them.
        replay_us: the median of a few replays on the device, of the examples with which a full
            batch is verified; None without verification, since padding costs less than real rows.
        nodes: how many of each kind, most frequent first: "kernel", "memcpy", "memset" and so on.
        kernels: launches by kernel, most frequent first.
        edges: dependencies between nodes.
        pdl_edges: those across which launches overlap (programmatic dependent launch).
        findings: what the audit found; see `CaptureReport.not_inspected` where it is None.
        q_len, variant: of the variant that was captured.
    """

    batch_size: int
    warmup_ms: float
    capture_ms: float
    verify_ms: float | None
    pool_mib: float | None
    device_mib: float | None
    verdict: str
    instantiate_ms: float | None = None
    audit_ms: float | None = None
    replay_us: float | None = None
    nodes: Mapping[str, int] | None = None
    kernels: Mapping[str, int] | None = None
    edges: int | None = None
    pdl_edges: int | None = None
    findings: tuple[Finding, ...] | None = None
    q_len: int = 1
    variant: str = ""

    @property
    def key(self) -> Key:
        """What the graph was captured for."""
        return Key(self.batch_size, Variant(self.q_len, self.variant))


@dataclass(frozen=True)
class CaptureReport:
    """What `GraphRunner.capture` did.

    Attributes:
        device: its name.
        total_ms: wall-clock time of the whole capture.
        graphs: one per variant and batch size, increasing.
        not_inspected: why nodes were not read and nothing was audited; None where they were, and
            on a CPU, which records none.
        notes: what the program that captures adds: names to words, shown with the rest.
    """

    device: str
    total_ms: float
    graphs: tuple[GraphReport, ...]
    not_inspected: str | None = None
    notes: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        """Return a table, the kernels of the largest batch size, and what the audit found."""
        count = len(self.graphs)
        sizes = "1 batch size" if count == 1 else f"{count} batch sizes"
        if len({(graph.q_len, graph.variant) for graph in self.graphs}) > 1:
            sizes = f"{count} graphs"
        title = f"{sizes} captured on {self.device} in {self.total_ms:.1f} ms"
        if self.device == "cpu":
            title += " (without CUDA a replay calls the step)"
        lines = [title, *_table(self.graphs)]
        if self.not_inspected is not None:
            lines.append(f"nodes were not inspected: {self.not_inspected}")
        if self.graphs and self.graphs[-1].kernels:
            lines += _kernel_lines(self.graphs[-1])
        for graph in self.graphs:
            if graph.findings:
                lines.append(f"audit of {graph.key}:")
                lines += [f"  {line}" for line in summarize(graph.findings).splitlines()]
        lines += [f"{name}: {words}" for name, words in self.notes.items()]
        return "\n".join(lines)

    def __add__(self, other: CaptureReport) -> CaptureReport:
        """Return the report of this capture and another one behind it on the same device."""
        return CaptureReport(
            self.device,
            self.total_ms + other.total_ms,
            self.graphs + other.graphs,
            self.not_inspected or other.not_inspected,
            {**self.notes, **other.notes},
        )

    def to_json(self) -> str:
        """Return the same as a JSON object, keys as the attributes."""
        return json.dumps(asdict(self))


def _table(graphs: tuple[GraphReport, ...]) -> list[str]:
    columns = {
        "batch": [str(graph.batch_size) for graph in graphs],
        "q_len": ["-" if graph.q_len == 1 else str(graph.q_len) for graph in graphs],
        "variant": [graph.variant or "-" for graph in graphs],
        "warm-up ms": [_number(graph.warmup_ms) for graph in graphs],
        "capture ms": [_number(graph.capture_ms) for graph in graphs],
        "instantiate ms": [_number(graph.instantiate_ms) for graph in graphs],
        "audit ms": [_number(graph.audit_ms) for graph in graphs],
        "verify ms": [_number(graph.verify_ms) for graph in graphs],
        "replay µs": [_number(graph.replay_us) for graph in graphs],
        "nodes": [_sum(graph.nodes) for graph in graphs],
        "kernels": [_sum(graph.kernels) for graph in graphs],
        "PDL edges": ["-" if g.pdl_edges is None else str(g.pdl_edges) for g in graphs],
        "pool MiB": [_number(graph.pool_mib) for graph in graphs],
        "device MiB": [_number(graph.device_mib) for graph in graphs],
    }
    shown = {name: cells for name, cells in columns.items() if set(cells) != {"-"}}
    widths = {name: max(map(len, [name, *cells])) for name, cells in shown.items()}
    lines = ["  ".join(f"{name:>{width}}" for name, width in widths.items()) + "  verdict"]
    for row, graph in enumerate(graphs):
        cells = (f"{cells[row]:>{widths[name]}}" for name, cells in shown.items())
        lines.append("  ".join(cells) + f"  {graph.verdict}")
    return lines


def _kernel_lines(graph: GraphReport) -> list[str]:
    kernels = graph.kernels or {}
    lines = [f"kernels of {graph.key}:"]
    for name, launches in list(kernels.items())[:_KERNELS_SHOWN]:
        lines.append(f"  {launches:>5} × {short_name(name, 90)}")
    if len(kernels) > _KERNELS_SHOWN:
        lines.append(f"  and {len(kernels) - _KERNELS_SHOWN} others")
    return lines


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _sum(counts: Mapping[str, int] | None) -> str:
    return "-" if counts is None else str(sum(counts.values()))
