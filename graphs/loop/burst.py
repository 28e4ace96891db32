"""Bursts: many steps in one launch, each of which feeds the next, without the host.

`GraphRunner.burst` starts one; the `Burst` it returns is read while it runs.
"""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

import torch

from ..arguments import as_integer, as_list
from ..buffer_spec import BufferSpec
from ..buffers import BatchView, StaticBuffers
from ..errors import BurstError, BusyError
from ..graph import BurstLoop, Graph
from ..graph_key import Key
from ..guards import ProcessGuard
from ..outputs import Step
from .inputs import WatchedStep
from .memory import BurstMemory
from .rules import BurstRules

Stops = Sequence[int] | Sequence[Sequence[int]]


class Burst:
    """Steps that are being taken; iterate over it for their tokens, as they come.

    Each item is a step: one token per row, None for a row that had ended before. Leaving the
    `with` block, `close`, and dropping the object end a burst that is still running: no step
    begins after the one under way. The runner refuses every other call until the burst has ended
    and its last step was read, or `close` was called. Threads that read a burst take turns. In a
    fork of the process nothing of it is read or ended.

    Args:
        loop: takes the steps.
        memory: where they leave their tokens.
        n: rows.
        finish: called once, when the burst has ended.
    """

    def __init__(
        self, loop: BurstLoop, memory: BurstMemory, n: int, finish: Callable[[], None]
    ) -> None:
        self._loop = loop
        self._memory = memory
        self._n = n
        self._finish: Callable[[], None] | None = finish
        # Of each step that was read, when it was done and its tokens: one entry, added at once,
        # since what a signal handler raises may come between any two lines.
        self._steps: list[tuple[int, list[int | None]]] = []
        self._reasons: list[str | None] = [None] * n
        self._process = ProcessGuard()
        # Held by the thread that reads. A handler of signals that comes up in it, before or behind
        # what is read, may read as well.
        self._lock = threading.RLock()
        self._reader = 0  # the thread in the midst of it, which on a CPU takes the step meanwhile

    @property
    def steps(self) -> int:
        """Steps that were read."""
        return len(self._steps)

    @property
    def times_ns(self) -> list[int]:
        """When each step that was read was done, by the clock of the GPU, or the host's on a CPU.

        The GPU's may move in steps of up to a microsecond.
        """
        return [time_ns for time_ns, _ in self._steps]

    @property
    def tokens(self) -> list[list[int]]:
        """The tokens of each row that were read."""
        rows = [row for _, row in self._steps]
        return [[t for row in rows if (t := row[i]) is not None] for i in range(self._n)]

    @property
    def reasons(self) -> list[str | None]:
        """Why each row has ended, as far as was read.

        "stop" (one of its stop tokens), "limit", "full" (no page for another token), "cancelled";
        None for one that goes on.
        """
        return list(self._reasons)

    def cancel(self) -> None:
        """Let no step begin after the one under way; what there is can still be read.

        Raises:
            ForkedError: in a fork of the process that the burst was begun in.
        """
        self._process.check()
        if self._finish is not None:
            self._memory.cancel()

    def close(self) -> None:
        """End the burst and read it to its end; again, or in a fork of the process, does nothing.

        Raises:
            BurstError: when the device failed.
            BusyError: from inside the step, or from a handler of signals that interrupts this
                thread's reading, which can `cancel`; nothing is changed then.
        """
        if self._process.is_fork:
            return
        self.check_outside()
        self.cancel()
        for _ in self:
            pass

    def check_outside(self) -> None:
        """Raise BusyError where the caller is inside of this burst's own read."""
        if self._reader == threading.get_ident():
            raise BusyError(
                "burst: got a call from the step or a signal handler of the thread that reads it, "
                "expected cancel(), which is allowed there"
            )

    def disown(self) -> None:
        """Leave the memory to the next burst."""
        self._finish = None

    def end(self, timeout_s: float) -> None:
        """Cancel the burst and read it to its end, unless another thread reads it for too long.

        Raises:
            BurstError, BusyError: as `close`.
        """
        self.check_outside()
        self.cancel()
        if self._lock.acquire(timeout=min(max(0.0, timeout_s), threading.TIMEOUT_MAX)):
            try:
                with suppress(StopIteration):
                    while True:
                        self._read()
            finally:
                self._lock.release()

    def __iter__(self) -> Iterator[list[int | None]]:
        """Return the burst: what was read once is not yielded again."""
        return self

    def __next__(self) -> list[int | None]:
        """Wait for a step and return its tokens.

        Raises:
            BurstError: when the device failed. On a CPU also what the step raises, and this for its
                StopIteration.
            BusyError: from inside the step.
            ForkedError: in a fork of the process that the burst was begun in.
        """
        self._process.check()
        self.check_outside()
        with self._lock:
            return self._read()

    def _read(self) -> list[int | None]:
        if self._finish is None:
            raise StopIteration
        self._reader = threading.get_ident()
        try:
            return self._read_step(self._memory, len(self._steps))
        finally:
            self._reader = 0

    def _read_step(self, memory: BurstMemory, step: int) -> list[int | None]:
        try:
            self._loop.wait(step)
        except Exception as error:
            self._end()
            if isinstance(error, StopIteration):  # of the step: the burst would seem to be over
                raise BurstError("the step raised StopIteration") from error
            raise
        if memory.published <= step:
            self._reasons = memory.reasons(self._n)
            self._end()
            raise StopIteration
        row: list[int | None] = []
        lengths, reasons = memory.lengths(self._n), memory.reasons(self._n)
        for index, token in enumerate(memory.tokens(step, self._n)):
            if lengths[index] and step >= lengths[index]:
                row.append(None)
                continue
            row.append(token)
            if lengths[index] == step + 1:
                self._reasons[index] = reasons[index]
        self._steps.append((memory.time_ns(step), row))
        if memory.done and memory.published == step + 1:
            self._end()
        return list(row)

    def __enter__(self) -> Burst:
        """Return the burst, which is closed on exit."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close the burst."""
        self.close()

    def __del__(self) -> None:
        """End what nobody will read."""
        with suppress(Exception):
            self.close()

    def _end(self) -> None:
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()


@dataclass(frozen=True)
class Ends:
    """When each row of a burst ends: after so many tokens, or with one of these."""

    limits: list[int]
    stops: list[list[int]]


class LoopMaker(Protocol):
    """What bursts need of a backend, which is a part of `Backend`."""

    def loop(
        self,
        graph: Graph,
        batch: BatchView,
        specs: Mapping[str, BufferSpec],
        rules: BurstRules,
        memory: BurstMemory,
    ) -> BurstLoop:
        """Return what repeats a graph that was captured for `batch`; outside of `scope`, too.

        Raises:
            BurstError: when it cannot be repeated on the device.
        """

    def follow(self) -> bool:
        """Order what the caller's stream gets next after the last run, on whichever stream.

        Returns:
            Whether `passed` has something to do when the stream has been given the run.
        """

    def passed(self) -> None:
        """Note that the caller's stream, which may soon be gone, has been given the run."""


class Bursts:
    """Starts the bursts of a runner.

    Args:
        rules: how the step feeds itself.
        buffers: its inputs.
        backend: where it runs.

    Raises:
        TypeError, ValueError: when the rules do not fit the buffers.
    """

    def __init__(self, rules: BurstRules, buffers: StaticBuffers, backend: LoopMaker) -> None:
        if not isinstance(rules, BurstRules):
            raise TypeError(f"burst: got {type(rules).__name__}, expected BurstRules")
        rules.check_buffers(buffers.specs)
        self._rules = rules
        self._buffers = buffers
        self._backend = backend
        self._memory = BurstMemory(rules, buffers.max_batch, buffers.device)
        self._current: weakref.ref[Burst] | None = None

    def watched(self, step: Step) -> WatchedStep:
        """Return the step such that its calls show whether it can be repeated."""
        return WatchedStep(step, self._rules, self._buffers.specs)

    def prepare(self, graph: Graph, key: Key) -> BurstLoop:
        """Return what repeats a graph, made at the first call; it goes with the graph.

        Raises:
            ValueError: when the rules do not fit the step's outputs.
            BurstError: when the step cannot be repeated on the device.
        """
        if graph.loop is None:
            self._rules.check_outputs(self._buffers.specs, graph.outputs)
            batch = self._buffers.view(*key)
            specs = self._buffers.specs
            graph.loop = self._backend.loop(graph, batch, specs, self._rules, self._memory)
        return graph.loop

    def start(
        self,
        graph: Graph,
        key: Key,
        inputs: Mapping[str, object],
        ends: Ends,
        finish: Callable[[], None],
    ) -> Burst:
        """Stage the inputs and begin a burst of as many rows as have ends.

        Raises:
            TypeError, ValueError: for bad inputs; nothing is changed then.
            BurstError: see `prepare`.
        """
        n = len(ends.limits)
        device = self._buffers.device
        if isinstance(inputs, Mapping):  # other things are refused when they are staged
            self._rules.check_pages(self._buffers.specs, inputs, ends.limits, device)
        self._buffers.rows(inputs, n)  # or refused
        loop = self.prepare(graph, key)
        self._backend.follow()
        launching, burst = False, None
        try:
            try:
                with torch.inference_mode(False), torch.no_grad():
                    self._buffers.stage(inputs, n, key.batch_size)
                    self._memory.start(ends.limits, ends.stops)
                    launching = True
                    loop.launch()
                burst = Burst(loop, self._memory, n, finish)
            finally:
                self._backend.passed()
            self._current = weakref.ref(burst)
            return burst
        except BaseException:
            if burst is not None:
                burst.disown()
            if launching:  # nobody could end what may be running
                self._memory.cancel()
                with suppress(Exception):
                    loop.abandon()
            raise

    def end_current(self, timeout_s: float) -> float:
        """Cancel the burst that is running, if one is, and read it to its end.

        Returns:
            What is left of the seconds to wait for another thread that reads it.

        Raises:
            BusyError: from inside its step; nothing is changed then.
        """
        burst = None if self._current is None else self._current()
        if burst is None:
            return timeout_s
        started = time.monotonic()
        burst.end(timeout_s)
        return timeout_s - (time.monotonic() - started)

    def check(self, n: int, steps: int, limits: Sequence[int] | None, stops: Stops) -> Ends:
        """Return when the rows end.

        Raises:
            TypeError, ValueError: when a number is out of range, or there is not one per row.
        """
        most = self._buffers.max_batch
        if not 1 <= n <= most:
            raise ValueError(f"n: got {n}, expected 1 to the buffers' max_batch={most}")
        return Ends(self._limits(n, steps, limits), self._stops(n, stops))

    def _limits(self, n: int, steps: int, limits: Sequence[int] | None) -> list[int]:
        most = self._rules.max_steps
        steps = as_integer("steps", steps)
        if not 1 <= steps <= most:
            raise ValueError(f"steps: got {steps}, expected 1 to the rules' max_steps={most}")
        if limits is None:
            return [steps] * n
        numbers = [as_integer("limits", limit) for limit in as_list("limits", limits)]
        if len(numbers) != n:
            raise ValueError(f"limits: got {len(numbers)}, expected one for each of {n} rows")
        if min(numbers) < 1:
            raise ValueError(f"limits: got {min(numbers)}, expected at least 1")
        return [min(number, steps) for number in numbers]

    def _stops(self, n: int, stops: Stops) -> list[list[int]]:
        entries = as_list("stops", stops)
        nested = [tokens for tokens in entries if isinstance(tokens, Sequence)]
        for entry in entries:
            # An array or a tensor of one number is a number.
            several = isinstance(entry, Iterable) and getattr(entry, "ndim", 1) > 0
            if several and not isinstance(entry, Sequence):
                kind = type(entry).__name__
                raise TypeError(f"stops: got a {kind}, expected tokens, or {n} lists of them")
        if not nested:
            rows = [[as_integer("stops", token) for token in entries]] * n
        elif len(nested) != len(entries) or len(entries) != n:
            raise ValueError(f"stops: got {len(entries)} entries, expected tokens, or {n} lists")
        else:
            rows = [[as_integer("stops", token) for token in tokens] for tokens in nested]
        for token in itertools.chain.from_iterable(rows):
            if not -(1 << 63) <= token < 1 << 63:
                raise ValueError(f"stops: got {token}, expected a number of 64 bits")
        longest = max(map(len, rows))
        if longest > self._rules.max_stops:
            raise ValueError(
                f"stops: got {longest} tokens, expected at most the rules' "
                f"max_stops={self._rules.max_stops}"
            )
        return rows
