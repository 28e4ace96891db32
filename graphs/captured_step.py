"""A step and the graphs of it: made, run and released. Who may do so is not decided here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Generic, TypeVar

import torch

from ._native import FastReplay
from .backends.autocast import without_autocast
from .backends.base import Backend
from .buffers import BatchView, StaticBuffers
from .capture import CaptureOptions, capture_graphs
from .capture_plan import CapturePlan
from .declared_memory import DeclaredMemory
from .errors import BurstError, GraphError
from .graph import Graph
from .graph_key import Key, Variant
from .graph_table import Bucket, GraphTable
from .guards import MemoryWatch
from .inspect.audit import Audit, Auditor
from .inspect.dot import to_dot
from .loop.burst import Bursts
from .metrics.replay_observer import ReplayObserver
from .metrics.stats import RunnerStats
from .outputs import Outputs, StepOutput
from .process_group import CaptureGroup
from .report import CaptureReport

OutputT = TypeVar("OutputT", bound=StepOutput)

_NOTHING = CapturePlan({}, {}, None)


class CapturedStep(Generic[OutputT]):
    """What a `GraphRunner` has behind its `Lifecycle`: one call at a time.

    Args:
        step, buffers, memory: as `GraphRunner` says.
        backend: where the graphs are.
        group: the processes that capture together.
        bursts: of the graphs; None where the step does not feed itself.

    Attributes:
        table: the graphs there are.
        plan: of the last successful capture; None before.
        watch: of the declared memory, since that capture.
        fast_replay: runs what was run before once more, while nothing but runs is done in between.
    """

    def __init__(
        self,
        step: Callable[[BatchView], OutputT],
        buffers: StaticBuffers,
        backend: Backend,
        *,
        memory: DeclaredMemory | None,
        group: CaptureGroup,
        bursts: Bursts | None,
    ) -> None:
        self._step = without_autocast(step, buffers.device.type)
        self._buffers = buffers
        self._backend = backend
        self._memory = memory
        self._group = group
        self._bursts = bursts
        self._auditor = Auditor(backend.inspector, buffers, memory)
        self._late_options = CaptureOptions(progress=False, verify=False, audit="off")
        self.table = GraphTable(_NOTHING)
        self.plan: CapturePlan | None = None
        self.watch = MemoryWatch(None)
        self.fast_replay: FastReplay = backend.fast_replay()
        self._observer: ReplayObserver | None = None
        self._observed = {"replay_times": False, "nvtx": False}

    def capture(
        self, plan: CapturePlan, *, progress: bool, verify: bool, audit: Audit
    ) -> CaptureReport:
        """Release what there is, and capture what is planned.

        Raises:
            GraphError: as `capture_graphs`; there are no graphs then.
        """
        self.release()
        misses = plan.misses
        watch = MemoryWatch(self._memory)
        try:
            graphs, report = capture_graphs(
                self._step,
                self._buffers,
                self._backend,
                plan.keys,
                warmed=plan.warmed,
                auditor=self._auditor,
                watch=watch,
                options=CaptureOptions(progress, verify, audit),
                bursts=self._bursts,
                group=self._group,
            )
        except BaseException:
            # Else something hangs on the device, and giving memory back would wait for it.
            if self._backend.is_idle():
                self._backend.leave_pool()
            raise
        table = GraphTable(plan)
        for key in plan.keys:
            table.put(key, graphs.pop(key))
        late = misses is not None and misses.verify
        self._late_options = CaptureOptions(False, late, audit, into_pool=True)
        self.watch, self.table, self.plan = watch, table, plan
        self.fast_replay.runs_to_look = 0
        self.observe(**self._observed)  # all counts begin anew
        return report

    def run(self, n: int, inputs: Mapping[str, object], variant: Variant) -> OutputT:
        """Run `n` rows: stage, replay, and return their outputs.

        Raises:
            TypeError, ValueError: for a bad `n`, variant or input.
            GraphError: when a graph that is missed cannot be captured.
        """
        bucket = self.table.find(n, variant)
        graph = bucket.graph
        if graph is None:
            return self._run_missed(bucket, n, inputs)
        foreign = self._backend.follow()  # as `_given`, without what a generator costs every run
        try:
            self._buffers.stage(inputs, n, bucket.key.batch_size)
            if self.table.limit is not None:
                self.table.use(bucket.key)
            if self._observer is None:
                graph.replay()
            else:
                self._observer.replay(bucket.key, graph)
        finally:
            if foreign:
                self._backend.passed()
        bucket.counts.add(n)
        outputs: OutputT = graph.outputs.rows(n)
        self._learn(bucket, graph, n, variant)
        return outputs

    def is_look_due(self) -> bool:
        """Count a run; return whether it must look at declared memory."""
        self.fast_replay.runs_to_look -= 1
        if self.fast_replay.runs_to_look > 0:
            return False
        self.fast_replay.runs_to_look = self.watch.runs_per_look
        return True

    def graph_for(
        self, n: int, inputs: Mapping[str, object], variant: Variant
    ) -> tuple[Key, Graph, Mapping[str, object]]:
        """Return the graph that a burst of `n` rows repeats, captured now if misses allow it.

        Returns:
            Its key, the graph, and the inputs, copied where the capture might have changed them.

        Raises:
            TypeError, ValueError: for a bad `n`, variant or input.
            GraphError: when there is none.
        """
        bucket = self.table.find(n, variant)
        misses = self.table.plan.misses
        if bucket.graph is None and misses is not None and misses.action == "capture":
            inputs = self._copied(inputs, n)
            self._capture_missed(bucket)
        if bucket.graph is None:
            raise BurstError(f"there is no graph of {bucket.key}, and a burst repeats one")
        self.table.use(bucket.key)
        return bucket.key, bucket.graph, inputs

    def drawing(self, key: Key) -> str:
        """Return a graph as Graphviz's `dot` reads it.

        Raises:
            ValueError: when there is none of that key.
            GraphError: when it cannot be read, or nothing was recorded.
        """
        bucket = self.table.buckets.get(key)
        if bucket is None or bucket.graph is None:
            sizes = list(self.table.captured(key.variant))
            raise ValueError(f"batch_size: got {key.batch_size}, expected one of {sizes}")
        nodes = self._backend.inspector.nodes(bucket.graph)
        if nodes is None:
            raise GraphError(f"no graph is recorded on {self._backend.name}: nothing to dump")
        return to_dot(nodes, f"{key} on {self._backend.name}")

    def observe(self, *, replay_times: bool, nvtx: bool) -> None:
        """Choose what is measured of runs, as `GraphRunner.observe` says.

        Raises:
            GraphError: when this torch has no NVTX.
        """
        timer = self._backend.replay_timer() if replay_times else None
        self._observer = ReplayObserver(timer, nvtx=nvtx) if replay_times or nvtx else None
        self._observed = {"replay_times": replay_times, "nvtx": nvtx}

    def stats(self) -> RunnerStats:
        """Return how the graphs were used since the last capture, from any thread."""
        table, observer = self.table, self._observer  # once: other threads may replace them
        return RunnerStats(
            tuple(bucket.stats() for bucket in table.buckets.values()),
            table.evictions,
            None if observer is None else observer.replay_us(),
        )

    def release(self) -> None:
        """Wait for the last run, and give back the graphs and their pool."""
        graphs = self.table.take_all()
        self.table = GraphTable(_NOTHING)
        if graphs:
            self._backend.release(graphs)
        self._backend.leave_pool()

    def _learn(self, bucket: Bucket, graph: Graph, n: int, variant: Variant) -> None:
        """Let the run that has just been made be repeated, if nothing is unusual about it.

        That says as much as that runs are admitted, in this process; whatever may change it takes
        the run lock, and so undoes this.
        """
        executable = graph.executable
        if executable is None or self._observer is not None or self.table.limit is not None:
            return
        self.fast_replay.learn(
            run_lock=self._backend.run_lock,
            n=n,
            variant=variant,
            batch_size=bucket.key.batch_size,
            stager=self._buffers,
            executable=executable,
            replay=graph.replay,
            counts=bucket.counts,
            look=self.watch.look,
            runs_per_look=self.watch.runs_per_look,
            rows=graph.outputs.kept(n),
            remake=graph.outputs.rows,
        )

    def _run_missed(self, bucket: Bucket, n: int, inputs: Mapping[str, object]) -> OutputT:
        """Run what there is no graph of, as the plan's `Misses` say."""
        misses = self.table.plan.misses
        if misses is not None and misses.action == "capture":
            inputs = self._copied(inputs, n)
            self._capture_missed(bucket)
            return self.run(n, inputs, bucket.key.variant)
        batch = self._buffers.view(*bucket.key)
        with self._given():
            self._buffers.stage(inputs, n, batch.size)
            # What the step makes here may outlive the caller's inference mode.
            with torch.inference_mode(False), torch.no_grad():
                outputs = Outputs.of(self._step(batch), batch)
        bucket.counts.add(n, replayed=False)
        rows: OutputT = outputs.rows(n)
        return rows

    def _copied(self, inputs: Mapping[str, object], n: int) -> dict[str, torch.Tensor]:
        """Copy inputs that a capture may write over: they may be views of the last outputs."""
        with self._given():
            return {name: rows.clone() for name, rows in self._buffers.rows(inputs, n).items()}

    @contextmanager
    def _given(self) -> Iterator[None]:
        """Order what the caller's stream is given here, also when it fails."""
        foreign = self._backend.follow()
        try:
            yield
        finally:
            if foreign:
                self._backend.passed()

    def _capture_missed(self, bucket: Bucket) -> None:
        self._backend.run_lock.forget()
        graphs, _ = capture_graphs(
            self._step,
            self._buffers,
            self._backend,
            [bucket.key],
            warmed=[bucket.key],
            auditor=self._auditor,
            watch=MemoryWatch(self._memory),
            options=self._late_options,
            bursts=self._bursts,
            group=self._group,
        )
        self.table.put(bucket.key, graphs.pop(bucket.key))
        bucket.captures += 1
        # Only now, when the capture has not failed.
        surplus = self.table.take_surplus()
        if surplus:
            self._backend.release(surplus)
