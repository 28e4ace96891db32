"""Bursts of decode steps in one launch, against the same steps launched one by one."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch

from ostinato.graphs import Add, BufferSpec, BurstRules, Feed, GraphRunner, StaticBuffers

from ...engine.decode_step import DecodeStep, SeenTokens
from ...models import Decoder, ModelConfig, PagedKVCache
from ..plans import check_least
from ..plot import Dot
from ..step.run import grown_pages
from ..timing import MIN_REPEATS, percentile, time_calls

_SPIN_THREADS = 2  # of this process, beside a process per core
_MOVING = ("positions", "seq_lens", "counters")


@dataclass(frozen=True)
class BurstPlan:
    """The measurements to make: every batch, with the host idle and loaded.

    Args:
        batches: sequences decoded at once.
        context: tokens of each sequence in the KV cache at the first step.
        steps: of a burst.
        repeats: bursts with the host idle; loaded, half of them.
        page_size: tokens per KV page.
    """

    batches: Sequence[int]
    context: int = 512
    steps: int = 64
    repeats: int = 6
    page_size: int = 16

    def check(self, config: ModelConfig) -> None:
        """Refuse what cannot be measured on a model.

        Raises:
            ValueError: for a number that is too small, or a context that the model does not have.
        """
        least = [("batch", batch, 1) for batch in self.batches]
        least += [("context", self.context, 1), ("steps", self.steps, 2)]
        least += [("repeats", self.repeats, 2), ("page_size", self.page_size, 1)]
        check_least(least)
        if self.context + self.steps > config.max_position_embeddings:
            raise ValueError(
                f"context: got {self.context} and {self.steps} steps, expected at most the model's "
                f"{config.max_position_embeddings}"
            )


@dataclass(frozen=True)
class BurstRow:
    """The time that a token of every sequence took, by one way of making it.

    Args:
        section: "burst".
        case: model, batch and context.
        impl: "replays" (back to back, nobody reads), "stepping" (each token is read and put into
            the next step's inputs), "burst", or "loop" (a burst whose step is a single addition:
            what a burst costs beside its steps, and a small kernel).
        host: "idle" or "loaded".
        us_mean: microseconds per step; of stepping and bursts over all steps by the host's clock,
            the start and the reading included.
        us_p50, us_p99: from the end of a step to the end of the next, by the device's clock.
        identical: whether the tokens were those of stepping.
    """

    section: str
    case: str
    impl: str
    host: str
    us_mean: float
    us_p50: float
    us_p99: float
    identical: bool | None = None

    def dots(self) -> list[Dot]:
        """Return the mean as the picture of the rows shows it."""
        series = f"{self.impl}, host {self.host}"
        return [Dot("mean of a step, µs", self.case, series, self.us_mean)]

    @property
    def jitter_us(self) -> float:
        """p99 - p50."""
        return self.us_p99 - self.us_p50


def time_bursts(model: Decoder, name: str, plan: BurstPlan) -> Iterator[BurstRow]:
    """Time the decode step in bursts and step by step, yielding rows as they are measured.

    Args:
        model: the decoder.
        name: of the model, as the rows shall call it.
        plan: what to measure.

    Raises:
        ValueError: at the first row, for what `BurstPlan.check` refuses.
    """
    plan.check(model.config)
    largest = max(plan.batches)
    pages_each = -(-(plan.context + plan.steps) // plan.page_size)
    cache = PagedKVCache.for_model(
        model.config,
        num_pages=1 + largest * pages_each,
        page_size=plan.page_size,
        device=model.device,
    )
    cache.randomize()
    seen = SeenTokens(largest, model.config.vocab_size, model.device)
    step = DecodeStep(model, cache, seen, max_pages=pages_each)
    buffers = StaticBuffers(step.buffer_specs(), largest, model.device)
    rules = step.burst_rules(plan.steps)
    with GraphRunner(step, buffers, memory=step.memory(), burst=rules) as runner:
        runner.capture(sorted(set(plan.batches)), verify=False)
        for batch in sorted(set(plan.batches)):
            case = f"{name} b{batch} ctx{plan.context}"
            row = partial(BurstRow, "burst", case)
            inputs = _first_inputs(cache, model, buffers, batch, plan)
            measured = _Measured(runner, model.device, inputs, plan)
            yield row("replays", "idle", *_summary(measured.replays()))
            expected = measured.stepping()[2]  # not timed: the clocks settle
            for host, load, repeats in (
                ("idle", nullcontext(), plan.repeats),
                ("loaded", _loaded_host(), plan.repeats // 2),
            ):
                with load:
                    for impl, run in (("stepping", measured.stepping), ("burst", measured.burst)):
                        runs = [run() for _ in range(repeats)]
                        mean = statistics.fmean(seconds for seconds, _, _ in runs) / plan.steps
                        gaps = [gap for _, gaps, _ in runs for gap in gaps]
                        _, p50, p99 = _summary(gaps)
                        identical = all(tokens == expected for _, _, tokens in runs)
                        yield row(impl, host, round(1e6 * mean, 2), p50, p99, identical)
            yield row("loop", "idle", *_summary(_bare_loop(batch, plan.steps, model.device)))


# Seconds in all, microseconds between the ends of steps, tokens of each sequence.
_Run = tuple[float, list[float], list[list[int]]]


class _Measured:
    """The ways of making the tokens of one batch."""

    def __init__(
        self,
        runner: GraphRunner[dict[str, torch.Tensor]],
        device: torch.device,
        inputs: dict[str, torch.Tensor],
        plan: BurstPlan,
    ) -> None:
        self._runner = runner
        self._device = device
        self._inputs = inputs
        self._plan = plan
        self._batch = len(inputs["tokens"])

    def replays(self) -> list[float]:
        """Return the microseconds of runs back to back, whose inputs are on the device."""
        placed = {name: tensor.to(self._device) for name, tensor in self._inputs.items()}
        run = partial(self._runner.run, self._batch, placed)
        repeats = max(MIN_REPEATS, self._plan.steps)
        return [1e6 * taken for taken in time_calls(run, self._device, repeats=repeats)]

    def stepping(self) -> _Run:
        """Run step by step, as an engine that reads each token and makes the next inputs of it."""
        inputs = {name: tensor.clone() for name, tensor in self._inputs.items()}
        ends, tokens = _Ends(self._device), []
        started = time.perf_counter()
        for _ in range(self._plan.steps):
            outputs = self._runner.run(self._batch, inputs)
            ends.mark()
            tokens.append(outputs["tokens"].tolist())
            inputs["tokens"] = torch.tensor(tokens[-1])
            for name in _MOVING:
                inputs[name] += 1
            inputs["slot_mapping"] = _slots(inputs, self._plan.page_size)
        seconds = time.perf_counter() - started
        return seconds, ends.gaps_us(), [list(row) for row in zip(*tokens, strict=True)]

    def burst(self) -> _Run:
        """Run all steps in one launch, reading tokens as they come."""
        started = time.perf_counter()
        burst = self._runner.burst(self._batch, self._inputs, self._plan.steps)
        for _ in burst:
            pass
        seconds = time.perf_counter() - started
        gaps = [(after - before) / 1e3 for before, after in pairwise(burst.times_ns)]
        return seconds, gaps, burst.tokens


class _Ends:
    """When steps end, by the device's clock: events of its stream, or the time on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events: list[torch.cuda.Event] = []
        self._times: list[float] = []

    def mark(self) -> None:
        if self._device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self._device))
            self._events.append(event)
        else:
            self._times.append(time.perf_counter())

    def gaps_us(self) -> list[float]:
        events = [1e3 * before.elapsed_time(after) for before, after in pairwise(self._events)]
        return events or [1e6 * (after - before) for before, after in pairwise(self._times)]


def _bare_loop(batch: int, steps: int, device: torch.device) -> list[float]:
    """Return the microseconds between the steps of a burst that hardly computes."""
    specs = {"x": BufferSpec((), torch.int64, 0), "position": BufferSpec((), torch.int32, 0)}
    rules = BurstRules({"x": Feed(None), "position": Add()}, None, max_steps=steps)
    buffers = StaticBuffers(specs, batch, device)
    with GraphRunner(lambda step: step.x + step.position, buffers, burst=rules) as runner:
        runner.capture([batch], verify=False)
        burst = runner.burst(batch, {"x": [0] * batch, "position": [0] * batch}, steps)
        for _ in burst:
            pass
    return [(after - before) / 1e3 for before, after in pairwise(burst.times_ns)]


def _summary(times_us: Sequence[float]) -> tuple[float, float, float]:
    """Return mean, p50 and p99."""
    p50, p99 = (percentile(times_us, p) for p in (50, 99))
    return round(statistics.fmean(times_us), 2), round(p50, 2), round(p99, 2)


# Until the process that started it is gone, however it ended.
_SPIN = """
import os
parent = os.getppid()
while os.getppid() == parent:
    pass
"""


@contextmanager
def _loaded_host() -> Iterator[None]:
    """Keep every core busy, and with them the interpreter's lock of this process."""
    stop = threading.Event()

    def spin() -> None:
        while not stop.is_set():
            pass

    threads = [threading.Thread(target=spin, daemon=True) for _ in range(_SPIN_THREADS)]
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(os.cpu_count() or 1):
            processes.append(subprocess.Popen([sys.executable, "-c", _SPIN]))
        for thread in threads:
            thread.start()
        yield
    finally:
        stop.set()
        for process in processes:
            process.kill()
            process.wait()


def _first_inputs(
    cache: PagedKVCache, model: Decoder, buffers: StaticBuffers, batch: int, plan: BurstPlan
) -> dict[str, torch.Tensor]:
    """Return the first step's inputs: random tokens at the end of sequences in the cache."""
    generator = torch.Generator().manual_seed(0)
    pages = grown_pages(cache, batch, plan.context + plan.steps)
    inputs = {
        "tokens": torch.randint(model.config.vocab_size, (batch,), generator=generator),
        "positions": torch.full((batch,), plan.context - 1),
        "seq_lens": torch.full((batch,), plan.context),
        "page_table": pages,
        "slots": torch.arange(batch),
        "temperature": torch.ones(batch),
        "top_k": torch.zeros(batch),
        "top_p": torch.ones(batch),
        "min_p": torch.zeros(batch),
        "repetition_penalty": torch.ones(batch),
        "seeds": torch.arange(batch),
        "counters": torch.full((batch,), plan.context),
    }
    inputs["slot_mapping"] = _slots(inputs, plan.page_size)
    return {name: inputs[name].to(spec.dtype) for name, spec in buffers.specs.items()}


def _slots(inputs: dict[str, torch.Tensor], page_size: int) -> torch.Tensor:
    """Return where the keys and values of each sequence's position go."""
    positions = inputs["positions"].long()[:, None]
    columns = (positions // page_size).clamp(max=inputs["page_table"].size(1) - 1)
    pages = inputs["page_table"].gather(1, columns).long()
    return (pages * page_size + positions % page_size)[:, 0]
