"""The CPU's backend: it records nothing, and a replay calls the step."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext

import torch

from .._native import FastReplay
from ..buffer_spec import BufferSpec
from ..buffers import BatchView
from ..errors import GraphError
from ..failures import Failure, Trace
from ..graph import BurstLoop, Graph, ReplayTimer
from ..guards import RunLock
from ..inspect.inspector import NoInspector
from ..loop.cpu import CpuLoop
from ..loop.memory import BurstMemory
from ..loop.rules import BurstRules
from ..outputs import Outputs, Step
from ..process_group import CaptureGroup


class CpuBackend:
    """Captures nothing: a replay calls the step and copies what it returns to where outputs live.

    Outputs of all batch sizes share memory, so that a program which holds on to them for too long
    goes wrong on a CPU as it would on a GPU.
    """

    name = "cpu"

    def __init__(self) -> None:
        self.run_lock = RunLock()
        self.inspector = NoInspector()
        self._shared: dict[tuple[str, torch.dtype, torch.Size], torch.Tensor] = {}

    def check_idle(self) -> None:
        """Find nothing wrong: a CPU cannot be capturing."""

    def fast_replay(self) -> FastReplay:
        """Return what repeats runs, which are in program order."""
        return FastReplay()

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

    def prepare_captures(self, *, into_pool: bool) -> None:
        """Make nothing ready."""

    def finish_captures(self) -> None:
        """End nothing: libraries keep no memory for a graph."""

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

    def replay_us(self, graph: Graph, group: CaptureGroup) -> float | None:
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
