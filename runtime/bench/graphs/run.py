"""The graph manager's own costs: capturing, memory, the host's time per run, and padding."""

from __future__ import annotations

import gc
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from unittest import mock

import torch

from ostinato.graphs import CaptureReport, GraphRunner, StaticBuffers, Variant, default_batch_sizes

from ..plot import Dot
from .subjects import Subject, Tiles

# What serving engines capture by default: 35 graphs.
MANY_BATCH_SIZES = (1, 2, 4, *range(8, 257, 8))
# Real rows, the bucket that serves them, and whether both have as many tiles of our GEMMs, for an
# 8B model's sizes: 33 rows have those of 48.
PADDED = (
    (3, 4, True),
    (5, 8, True),
    (9, 16, True),
    (17, 32, True),
    (33, 64, False),
    (49, 64, True),
)

_IN_BUCKET = Variant(name="bucket")
# Real rows and buckets of the runs whose time on the host is taken: so many, in each round.
_RUN_SIZES = ((1, 1), (5, 8), (64, 64))
_RUNS, _ROUNDS = 40, 5
_TURNS = 15
_REPLAYS = 8  # per turn
_UNITS = ("s", "MiB", "µs")  # as figures name them


@dataclass(frozen=True)
class Figure:
    """Something measured.

    Args:
        case: what was measured with.
        figure: what it is, with its unit.
        value: the number.
        target: at most so much is wanted; None where nothing was said.
    """

    case: str
    figure: str
    value: float
    target: float | None = None
    section: str = "graphs"

    def dots(self) -> list[Dot]:
        """Return the value as the picture of the rows shows it, beside others of its unit."""
        unit = next((part for part in self.figure.split(", ") if part in _UNITS), "count or ratio")
        return [Dot(unit, self.case, self.figure, self.value)]

    def __str__(self) -> str:
        """Return one line."""
        wanted = ""
        if self.target is not None:
            verdict = "reached" if self.value <= self.target else "MISSED"
            wanted = f"  (at most {self.target:g}: {verdict})"
        return f"{self.case:<38} {self.figure:<42} {self.value:>12.4g}{wanted}"


def measure(subject: Subject) -> Iterator[Figure]:
    """Measure everything, yielding figures as they come; verification, which may refuse, is last.

    Raises:
        GraphError: when the step cannot be captured, or its replays differ from it.
    """
    yield from _captures(subject)
    yield from _runs(subject)
    yield from _padding(subject)
    yield from _checks(subject)


def _runner(subject: Subject) -> GraphRunner:
    return GraphRunner(subject.step, subject.buffers, memory=subject.memory)


def _captures(subject: Subject) -> Iterator[Figure]:
    max_batch = subject.buffers.max_batch
    many = tuple(size for size in MANY_BATCH_SIZES if size <= max_batch)
    tiles = default_batch_sizes(max_batch)
    with _runner(subject) as runner:
        alone = runner.capture([max_batch], progress=False, verify=False, audit="off")
        largest = alone.graphs[0].pool_mib
        for name, sizes, target in (("graphs", many, 2.0), ("tile boundaries", tiles, 0.5)):
            case = f"{subject.name}, {len(sizes)} {name}"
            report = runner.capture(sizes, progress=False, verify=False, audit="off")
            yield from _capture_figures(case, report, target)
            total = sum(graph.pool_mib or 0.0 for graph in report.graphs)
            yield Figure(case, "pool, MiB", total)
            if largest and sizes[-1] == max_batch:
                yield Figure(case, "pool of the largest alone, MiB", largest)
                yield Figure(case, "pool against the largest alone", total / largest, 1.1)


def _capture_figures(case: str, report: CaptureReport, target: float) -> Iterator[Figure]:
    warmup = sum(graph.warmup_ms for graph in report.graphs)
    instantiate = sum(graph.instantiate_ms or 0.0 for graph in report.graphs)
    yield Figure(case, "warm-up, s", warmup / 1e3)
    yield Figure(case, "all after warm-up, s", (report.total_ms - warmup) / 1e3, target)
    yield Figure(case, "of it instantiation, s", instantiate / 1e3)
    device = sum(graph.device_mib or 0.0 for graph in report.graphs)
    yield Figure(case, "device memory taken, MiB", device)


def _runs(subject: Subject) -> Iterator[Figure]:
    device = subject.buffers.device
    sizes = [pair for pair in _RUN_SIZES if pair[1] <= subject.buffers.max_batch]
    with _runner(subject) as runner:
        buckets = [bucket for _, bucket in sizes]
        runner.capture(buckets, progress=False, verify=False, audit="off")
        cases = []
        for n, bucket in sizes:
            on_host = subject.inputs(n)
            on_device = {name: value.to(device) for name, value in on_host.items()}
            cases += [_HostRuns(n, bucket, "host", on_host)]
            cases += [_HostRuns(n, bucket, "device", on_device)]
        # In rounds, so that a second in which the host is slow is not all that one case has.
        for _ in range(_ROUNDS):
            for each in cases:
                each.measure(runner, subject.buffers)
    for each in cases:
        case = f"{subject.name}, {each.n} rows in {each.bucket}"
        label = f"inputs on the {each.place}"
        run, stage, beyond = each.medians()
        yield Figure(case, f"run() on the host, p50, µs, {label}", run)
        yield Figure(case, f"staging in it, p50, µs, {label}", stage)
        yield Figure(case, f"run() beyond staging, p50, µs, {label}", beyond, 10.0)
        per_run = each.allocations / len(each.runs)
        yield Figure(case, f"allocator calls per run, {label}", per_run, 0.0)


@dataclass
class _HostRuns:
    """Runs of a batch on an idle device, and the nanoseconds that they took of the host."""

    n: int
    bucket: int
    place: str  # of the inputs
    inputs: dict[str, torch.Tensor]
    runs: list[int] = field(default_factory=list)
    staged: list[int] = field(default_factory=list)
    allocations: int = 0

    def measure(self, runner: GraphRunner, buffers: StaticBuffers) -> None:
        """Run a round."""
        stage, clock = buffers.stage, time.perf_counter_ns

        def timed_stage(inputs: Mapping[str, object], n: int, bucket: int) -> None:
            started = clock()
            stage(inputs, n, bucket)
            self.staged.append(clock() - started)

        gc.collect()
        before = _allocations(buffers.device)
        with mock.patch.object(buffers, "stage", timed_stage):
            for _ in range(_RUNS):
                torch.cuda.synchronize(buffers.device)
                started = clock()
                runner.run(self.n, self.inputs)
                self.runs.append(clock() - started)
        self.allocations += _allocations(buffers.device) - before

    def medians(self) -> tuple[float, float, float]:
        """Return the median microseconds of a run, of its staging, and of the rest of it."""
        rest = [run - stage for run, stage in zip(self.runs, self.staged, strict=True)]
        run_us, stage_us, rest_us = (
            statistics.median(times) / 1e3 for times in (self.runs, self.staged, rest)
        )
        return run_us, stage_us, rest_us


def _allocations(device: torch.device) -> int:
    return int(torch.cuda.memory_stats(device)["allocation.all.allocated"])


def _padding(subject: Subject) -> Iterator[Figure]:
    pairs = [pair for pair in PADDED if pair[1] <= subject.buffers.max_batch]
    exact, padded = Variant(), _IN_BUCKET
    with _runner(subject) as runner:
        sizes = {
            exact: [n for n, _, _ in pairs],
            padded: sorted({bucket for _, bucket, _ in pairs}),
        }
        report = runner.capture(sizes, progress=False, verify=False)
        kernels = {(graph.batch_size, graph.variant): graph.kernels for graph in report.graphs}
        runner.observe(replay_times=True)
        for n, bucket, one_tile in pairs:
            device = subject.buffers.device
            inputs = {name: value.to(device) for name, value in subject.inputs(n).items()}
            times = _take_turns(runner, n, inputs, (exact, padded), device)
            case = f"{subject.name}, {n} rows in {bucket}"
            yield Figure(case, "replay of an exact graph, µs", times[0])
            yield Figure(case, "padded replay, µs", times[1])
            launches = kernels[n, exact.name], kernels[bucket, padded.name]
            if None not in launches:
                others = (Counter(launches[1]) - Counter(launches[0])).total()
                yield Figure(case, "launches of kernels that the exact graph has not", others)
            shared = falls_in_one_tile(subject.tiles, one_tile, *launches)
            target = 1.02 if shared else None
            yield Figure(case, "padded against exact", times[1] / times[0], target)


def falls_in_one_tile(
    tiles: Tiles,
    ours: bool,
    exact: Mapping[str, int] | None,
    padded: Mapping[str, int] | None,
) -> bool:
    """Return whether a padded batch falls in as many tiles as one of exact size.

    Args:
        tiles: of the subject.
        ours: whether our GEMMs have as many tiles for both.
        exact: launches by kernel of the exact batch's graph; None where it was not read.
        padded: likewise of the padded batch's.
    """
    if tiles == "library":
        return exact is not None and exact == padded
    return tiles == "ours" and ours


def _checks(subject: Subject) -> Iterator[Figure]:
    tiles = default_batch_sizes(subject.buffers.max_batch)
    with _runner(subject) as runner, subject.capture_examples():
        report = runner.capture(tiles, progress=False)
    case = f"{subject.name}, {len(tiles)} tile boundaries"
    audit = sum(graph.audit_ms or 0.0 for graph in report.graphs)
    yield Figure(case, "audit, s", audit / 1e3)
    yield Figure(case, "verification, s", sum(g.verify_ms or 0.0 for g in report.graphs) / 1e3)


def _take_turns(
    runner: GraphRunner,
    n: int,
    inputs: dict[str, torch.Tensor],
    variants: Sequence[Variant],
    device: torch.device,
) -> list[float]:
    """Return the median of the turns' mean replay times in µs, of each variant."""
    means: list[list[float]] = [[] for _ in variants]
    for turn in range(-1, _TURNS):  # the first is not counted
        order = list(enumerate(variants))
        for index, variant in order if turn % 2 else order[::-1]:
            before = _total_us(runner, device)
            for _ in range(_REPLAYS):
                runner.run(n, inputs, variant=variant)
            taken = (_total_us(runner, device) - before) / _REPLAYS
            if turn >= 0:
                means[index].append(taken)
    return [statistics.median(taken) for taken in means]


def _total_us(runner: GraphRunner, device: torch.device) -> float:
    torch.cuda.synchronize(device)
    times = runner.stats().replay_us
    return 0.0 if times is None else times.total
