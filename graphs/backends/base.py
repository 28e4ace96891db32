"""What capturing needs of a device, and how the CPU provides it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch

from ostinato import _C

from ..buffer_spec import BufferSpec
from ..buffers import BatchView
from ..errors import GraphError
from ..guards import Turn
from ..inspect.allocations import Allocation
from ..inspect.diagnosis import (
    Failure,
    Trace,
)
from ..inspect.nodes import Recording
from ..loop.cpu import CpuLoop
from ..loop.memory import BurstMemory
from ..loop.rules import BurstRules
from ..outputs import Outputs, Step
from ..process_group import Ranks


class ReplayTimer(Protocol):
    """Times replays without waiting for them."""

    def replay(self, graph: Graph) -> bool:
        """Replay; return whether the replay is timed."""

    def finished(self) -> list[float]:
        """Return the microseconds of timed replays that have ended since the last call.

        Another thread may be in `replay`, but not in here.
        """


@dataclass(frozen=True)
class MemoryUse:
    """Device memory in bytes: reserved by the graphs' pool, and free according to the driver."""

    pool_bytes: int
    free_bytes: int


class BurstLoop(Protocol):
    """Repeats one captured step, each time on what the last one left in its buffers."""

    def launch(self) -> None:
        """Begin on the caller's stream, where `BurstMemory.start` has been called."""

    def wait(self, step: int) -> None:
        """Return when the tokens of `step` are in the memory, or the burst has ended.

        Raises:
            BurstError: when the device failed before that.
        """

    def abandon(self) -> None:
        """Wait for the end of what `launch` may have begun, after the burst was cancelled."""

    def release(self) -> None:
        """Give back what the driver holds for the loop. No burst may be running."""


class Graph(Protocol):
    """A step captured for one batch size.

    Attributes:
        loop: what repeats it, once that was made; released with the graph.
    """

    loop: BurstLoop | None

    @property
    def outputs(self) -> Outputs:
        """Where every replay writes; on CUDA without a hold on the pool's memory."""

    @property
    def executable(self) -> int | None:
        """What the driver launches, 0 where `replay` must be called.

        None where that is not known yet, or a replay takes more than either.
        """

    @property
    def instantiate_ms(self) -> float | None:
        """What making an executable of the recording took; None where there is none to make."""

    def replay(self) -> None:
        """Run the step on what its buffers hold now, on the current stream."""

    def release(self) -> None:
        """Give back what the driver holds for the graph."""


class Backend(Protocol):
    """How steps are run, captured and replayed on one device.

    Methods are called inside `scope`; but `check_idle`, `follow`, `replay_timer`, `release`,
    `leave_pool` and `close` outside of it. `Graph.replay` is called inside it, or after `follow`.
    """

    @property
    def name(self) -> str:
        """The device's name, as a person knows it."""

    @property
    def turn(self) -> Turn:
        """Whose turn it is among the runners that share the graphs' memory."""

    def check_idle(self) -> None:
        """Raise BusyError where nothing may be run: the caller is capturing a graph itself."""

    def repeat(self) -> _C.Repeat:
        """Return what repeats runs here; see `CapturedStep`."""

    def scope(self) -> AbstractContextManager[None]:
        """Enter the place where everything runs, ordered after and before the caller's work."""

    def follow(self) -> bool:
        """Order what the caller's stream gets next after the last run, on whichever stream.

        Returns:
            Whether `passed` has something to do when the stream has been given the run.
        """

    def passed(self) -> None:
        """Note that the caller's stream, which may soon be gone, has been given the run."""

    def synchronize(self) -> None:
        """Wait for what has been run in `scope`."""

    def is_idle(self) -> bool:
        """Return whether all that was run in `scope` has ended, without waiting; also by errors."""

    def prepare_capture(self) -> None:
        """Make ready for a series of captures, after their warm-up."""

    def capture(self, step: Step, batch: BatchView) -> Graph:
        """Capture one call of the step. A step that raises leaves the backend usable."""

    def failure(self, step: Step, batch: BatchView) -> Failure:
        """Return what is known of the `capture` that has just failed, for the same arguments.

        The step may be called once more, in a capture that is thrown away.
        """

    def trace(self, step: Step, batch: BatchView) -> Trace | None:
        """Watch the step in a capture that is thrown away; None where nothing is recorded."""

    def owned(self, outputs: Outputs) -> Sequence[int]:
        """Return which of a graph's outputs, by index, are in its own memory, not the step's."""

    def memory(self) -> MemoryUse | None:
        """Measure device memory; None where graphs take none."""

    def check_readable(self) -> None:
        """Raise GraphError where `recording` will, with the remedy."""

    def recording(self, graph: Graph) -> Recording | None:
        """Read what a graph consists of; None where nothing is recorded.

        Raises:
            GraphError: when it cannot be read.
        """

    def allocations(self) -> Sequence[Allocation]:
        """Return the device memory that torch's allocator has, the graphs' pool first."""

    def location_of(self, address: int) -> str | None:
        """Return "device 0" or "the host", which means pinned; None if the driver knows neither."""

    def replay_us(self, graph: Graph, ranks: Ranks) -> float | None:
        """Replay a few times and return the median in µs; None where nothing is recorded.

        All ranks replay equally often.

        Raises:
            RankError: when another rank has failed.
        """

    def replay_timer(self) -> ReplayTimer:
        """Return what times replays in the midst of serving."""

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

    def release(self, graphs: list[Graph]) -> None:
        """Give back the graphs, emptying the list, and their memory.

        First wait for replays, and for what the caller's stream does with their outputs.
        """

    def leave_pool(self) -> None:
        """Give back the pool after its last graph, unless it is the caller's."""

    def close(self) -> None:
        """Let go of what is held between captures."""


class CpuBackend:
    """Captures nothing: a replay calls the step and copies what it returns to where outputs live.

    Outputs of all batch sizes share memory, so that a program which holds on to them for too long
    goes wrong on a CPU as it would on a GPU.
    """

    name = "cpu"

    def __init__(self) -> None:
        self.turn = Turn()
        self._shared: dict[tuple[str, torch.dtype, torch.Size], torch.Tensor] = {}

    def check_idle(self) -> None:
        """Find nothing wrong: a CPU cannot be capturing."""

    def repeat(self) -> _C.Repeat:
        """Return what repeats runs, which are in program order."""
        return _C.Repeat()

    def scope(self) -> AbstractContextManager[None]:
        """Enter nothing: a CPU runs in program order."""
        return nullcontext()

    def follow(self) -> bool:
        """Order nothing: a CPU runs in program order."""
        return False

    def passed(self) -> None:
        """Note nothing: a run has ended."""

    def synchronize(self) -> None:
        """Wait for nothing: every call has finished when it returns."""

    def is_idle(self) -> bool:
        """Return True: every call has finished when it returns."""
        return True

    def prepare_capture(self) -> None:
        """Make nothing ready."""

    def capture(self, step: Step, batch: BatchView) -> Graph:
        """Call the step once and keep memory for its outputs."""
        outputs = Outputs.of(step(batch), batch)
        places = [self._place(*layout) for layout in outputs.layout()]
        graph = _CpuGraph(step, batch, outputs.like(places))
        graph.write(outputs)
        return graph

    def failure(self, step: Step, batch: BatchView) -> Failure:
        """Return nothing: the step's own exception says it all."""
        return Failure()

    def trace(self, step: Step, batch: BatchView) -> Trace | None:
        """Return None: nothing is recorded."""
        return None

    def owned(self, outputs: Outputs) -> Sequence[int]:
        """Return all: outputs are copied into memory of the backend."""
        return range(len(outputs.tensors))

    def memory(self) -> MemoryUse | None:
        """Return None: there is no device memory."""
        return None

    def check_readable(self) -> None:
        """Find nothing wrong: there will be nothing to read."""

    def recording(self, graph: Graph) -> Recording | None:
        """Return None: nothing is recorded."""
        return None

    def allocations(self) -> Sequence[Allocation]:
        """Return none: there is no device memory."""
        return ()

    def location_of(self, address: int) -> str | None:
        """Return None: there is no device memory."""
        return None

    def replay_us(self, graph: Graph, ranks: Ranks) -> float | None:
        """Return None: a replay is a call of the step."""
        return None

    def replay_timer(self) -> ReplayTimer:
        """Return a clock on the wall."""
        return _CallTimer()

    def loop(
        self,
        graph: Graph,
        batch: BatchView,
        specs: Mapping[str, BufferSpec],
        rules: BurstRules,
        memory: BurstMemory,
    ) -> BurstLoop:
        """Return what takes the steps one by one, as their tokens are asked for."""
        return CpuLoop(graph, batch, specs, rules, memory)

    def release(self, graphs: list[Graph]) -> None:
        """Forget the graphs."""
        while graphs:
            graphs.pop().release()

    def leave_pool(self) -> None:
        """Forget the memory of outputs."""
        self._shared = {}

    def close(self) -> None:
        """Let go of nothing: nothing is held between captures."""

    def _place(self, name: str, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        key = (name, dtype, shape[1:])
        shared = self._shared.get(key)
        if shared is None or shared.size(0) < shape[0]:
            with torch.inference_mode(False):
                shared = self._shared[key] = torch.empty(shape, dtype=dtype, device="cpu")
        return shared[: shape[0]]


class _CpuGraph:
    executable = 0
    instantiate_ms = None

    def __init__(self, step: Step, batch: BatchView, outputs: Outputs) -> None:
        self.outputs = outputs
        self.loop: BurstLoop | None = None
        self._layout = outputs.layout()
        self._step = step
        self._batch = batch

    def replay(self) -> None:
        # What the step makes here may outlive the caller's inference mode.
        with torch.inference_mode(False), torch.no_grad():
            self.write(Outputs.of(self._step(self._batch), self._batch))

    def write(self, fresh: Outputs) -> None:
        if fresh.layout() != self._layout:
            raise GraphError(
                f"step: returned {fresh.layout()}, but {self._layout} when captured; "
                "a captured step cannot change what it returns"
            )
        for place, tensor in zip(self.outputs.tensors, fresh.tensors, strict=True):
            place.copy_(tensor)

    def release(self) -> None:
        """Give nothing back: no driver holds anything."""


class _CallTimer:
    def __init__(self) -> None:
        self._finished: deque[float] = deque()  # which two threads may change at once

    def replay(self, graph: Graph) -> bool:
        started = time.perf_counter()
        graph.replay()
        self._finished.append(1e6 * (time.perf_counter() - started))
        return True

    def finished(self) -> list[float]:
        return [self._finished.popleft() for _ in range(len(self._finished))]
