"""GraphRunner: captures a step once per batch size, and replays it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import Generic, TypeVar

import torch

from ostinato.graphs.audit import AUDITS, Audit, Auditor
from ostinato.graphs.backend import Backend, CpuBackend, Graph
from ostinato.graphs.buckets import check_batch_sizes, default_batch_sizes, smallest_bucket
from ostinato.graphs.buffers import BatchView, StaticBuffers
from ostinato.graphs.capture import capture_graphs
from ostinato.graphs.cuda_backend import CudaBackend, PoolHandle
from ostinato.graphs.dot import to_dot
from ostinato.graphs.errors import (
    BusyError,
    CaptureError,
    GraphError,
    NotCapturedError,
)
from ostinato.graphs.gate import Gate
from ostinato.graphs.guards import MemoryWatch
from ostinato.graphs.integers import as_integer
from ostinato.graphs.memory import DeclaredMemory, kept_alive
from ostinato.graphs.outputs import StepOutput
from ostinato.graphs.report import CaptureReport
from ostinato.graphs.stats import BucketStats, RunnerStats

OutputT = TypeVar("OutputT", bound=StepOutput)

_WATCHED_PER_RUN = 4  # of the declared tensors, a microsecond or two


class GraphRunner(Generic[OutputT]):
    """Runs a step function from graphs captured once per batch size.

    On a CUDA device a run copies its inputs into the static buffers and replays the CUDA graph of
    the smallest captured batch size that holds them. On a CPU it calls the step instead, with the
    same padding, lifetimes and refusals, so that a program runs unchanged on both.

    The step must be repeatable: called twice on the same inputs, it returns the same, bit for bit,
    and leaves its state as one call would. It runs without autograd. What it reads besides the
    buffers (weights, caches) must stay where it is; the values there may change.

    Calls from several threads at once are refused, not queued.

    Args:
        step: takes a `BatchView` and returns a tensor, or a tuple or dict of tensors, with one row
            per row of the batch.
        buffers: the inputs; their device is the runner's.
        memory: what else the step works on and stays where it is: names such as "weights" and
            "cache" to modules or tensors, which are kept alive. The audit reports any other memory,
            and runs are refused when something of it has moved. By default the audit takes every
            live tensor for the step's own.
        pool: memory pool of the graphs, from `torch.cuda.graph_pool_handle()`; by default a new
            one for each capture. Runners that share a pool must share `stream` too. To capture into
            a given pool again, drop the outputs of earlier runs first. CUDA only.
        stream: where everything runs; by default one of its own. CUDA only.
        group: processes that begin a capture together, after a barrier.

    Raises:
        TypeError, ValueError: when an argument is of the wrong kind, or for another device.
    """

    def __init__(
        self,
        step: Callable[[BatchView], OutputT],
        buffers: StaticBuffers,
        *,
        memory: DeclaredMemory | None = None,
        pool: PoolHandle | None = None,
        stream: torch.cuda.Stream | None = None,
        group: torch.distributed.ProcessGroup | None = None,
    ) -> None:
        if not callable(step):
            raise TypeError(f"step: got {type(step).__name__}, expected a callable")
        if not isinstance(buffers, StaticBuffers):
            raise TypeError(f"buffers: got {type(buffers).__name__}, expected StaticBuffers")
        if group is not None and not isinstance(group, torch.distributed.ProcessGroup):
            raise TypeError(f"group: got {type(group).__name__}, expected a ProcessGroup")
        self._step = step
        self._buffers = buffers
        self._group = group
        self._backend = _make_backend(buffers.device, pool, stream)
        self._memory = None if memory is None else kept_alive(memory)
        self._auditor = Auditor(self._backend, buffers, self._memory)
        self._watch = MemoryWatch(None)
        self._gate = Gate(self, self._backend)
        self._graphs: dict[int, Graph] = {}
        self._batch_sizes: tuple[int, ...] = ()
        self._last_batch_sizes: tuple[int, ...] = ()
        self._counts: dict[int, tuple[int, int]] = {}  # runs and real rows

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """The captured batch sizes, increasing; empty before a capture."""
        return self._batch_sizes

    @property
    def max_batch_size(self) -> int:
        """The largest captured batch size.

        Raises:
            GraphError: when nothing can be run; see `require_captured`.
        """
        self._gate.require_ready()
        return self._batch_sizes[-1]

    def capture(
        self,
        batch_sizes: Iterable[int] | None = None,
        *,
        progress: bool = True,
        verify: bool = True,
        audit: Audit = "report",
    ) -> CaptureReport:
        """Capture the step for each batch size; graphs captured before are released first.

        The step is called twice per size for warm-up, on padding rows only, then once to be
        captured; verification calls it on example inputs. A failure leaves nothing captured, and
        the runner as ready as a new one.

        Args:
            batch_sizes: strictly increasing, at most the buffers' `max_batch`. By default 1, 2, 4,
                8, 16, 32, 64, the multiples of 128, and `max_batch`.
            progress: show a bar, where standard error is a terminal.
            verify: compare replays with the step, bit for bit.
            audit: "report" reads the graphs and reports their nodes and what may go wrong with
                them, where cuda-python is installed; "strict" refuses a graph with such a finding;
                "off" reads nothing.

        Raises:
            ValueError: for bad batch sizes, with the corrected list, or another `audit`; nothing is
                changed then.
            CaptureError: when the step fails.
            AuditError: when a strict audit refuses a graph.
            GraphError: when a strict audit is impossible, for want of cuda-python.
            VerificationError: when a replay differs from the step.
            ClosedError, BusyError: see `run`.
        """
        _check_audit(audit)
        with self._gate.exclusively("capture"):
            self._gate.require_open()
            if batch_sizes is None:
                sizes = default_batch_sizes(self._buffers.max_batch)
            else:
                sizes = check_batch_sizes(batch_sizes, self._buffers.max_batch)
            return self._capture(sizes, progress, verify, audit)

    def recapture(
        self, *, progress: bool = True, verify: bool = True, audit: Audit = "report"
    ) -> CaptureReport:
        """Capture the batch sizes of the last successful capture again.

        Raises:
            NotCapturedError: when there was none.
            ValueError, CaptureError, AuditError, VerificationError, GraphError, ClosedError,
                BusyError: as `capture`.
        """
        _check_audit(audit)
        with self._gate.exclusively("recapture"):
            self._gate.require_open()
            if not self._last_batch_sizes:
                raise NotCapturedError("nothing has been captured: call capture() first")
            return self._capture(self._last_batch_sizes, progress, verify, audit)

    def run(self, n: int, inputs: Mapping[str, object]) -> OutputT:
        """Run the step on `n` rows and return the first `n` rows of its outputs.

        Never captures. On CUDA the call does not wait for the device, and is ordered with the
        caller's current stream as any operation on that stream would be.

        The outputs are views of memory that the next run, of any batch size, overwrites: use or
        copy them before.

        Args:
            n: rows, from 1 to `max_batch_size`.
            inputs: for each buffer `n` rows: a tensor on the CPU or the runner's device, of the
                buffer's dtype, or a sequence of numbers.

        Raises:
            TypeError, ValueError: for a bad `n` or input; nothing is changed then.
            NotCapturedError, InvalidatedError, ClosedError: when there is nothing to replay, or
                declared memory was seen to have moved; see `check_memory`.
            BusyError: when another capture or run of this runner is under way, or of one with the
                same pool, or the caller's current stream is being captured.
            ForkedError: in a fork of the process that the runner was made in.
        """
        with self._gate.exclusively("run"):
            self._gate.require_ready()
            self._refuse_moved(self._watch.moved(_WATCHED_PER_RUN))
            n = as_integer("n", n)
            bucket = smallest_bucket(n, self._batch_sizes)
            graph = self._graphs[bucket]
            with self._backend.scope():
                self._buffers.stage(inputs, n, bucket)
                graph.replay()
            hits, rows = self._counts[bucket]
            self._counts[bucket] = (hits + 1, rows + n)
            outputs: OutputT = graph.outputs.rows(n)
            return outputs

    def bucket_for(self, n: int) -> int:
        """Return the batch size that a run of `n` rows would replay.

        Raises:
            TypeError, ValueError: for a bad `n`.
            GraphError: when nothing can be run; see `require_captured`.
        """
        self._gate.require_ready()
        return smallest_bucket(as_integer("n", n), self._batch_sizes)

    def require_captured(self) -> None:
        """Raise what `run` would raise now if there is nothing to replay.

        Raises:
            NotCapturedError, InvalidatedError, ClosedError: with the remedy.
        """
        self._gate.require_ready()

    def dump(self, batch_size: int, path: str | PathLike[str]) -> None:
        """Write the graph of a captured batch size as a drawing that Graphviz's `dot` reads.

        Raises:
            TypeError, ValueError: when the batch size is not one of `batch_sizes`.
            GraphError: when nothing can be run (see `require_captured`), cuda-python is missing, or
                nothing was recorded, as on a CPU.
            BusyError: when a capture or run is under way.
        """
        with self._gate.exclusively("dump"):
            self._gate.require_ready()
            size = as_integer("batch_size", batch_size)
            if size not in self._graphs:
                raise ValueError(
                    f"batch_size: got {size}, expected one of {list(self._batch_sizes)}"
                )
            recording = self._backend.recording(self._graphs[size])
            if recording is None:
                raise GraphError(f"no graph is recorded on {self._backend.name}: nothing to dump")
            title = f"batch size {size} on {self._backend.name}"
            Path(path).write_text(to_dot(recording, title), encoding="utf-8")

    def check_memory(self) -> None:
        """Look at all declared memory; each run looks at a few tensors of it in turn.

        Raises:
            InvalidatedError: when a tensor is not where it was at the capture. Runs are refused
                from then on.
            GraphError: when nothing can be run; see `require_captured`.
        """
        with self._gate.exclusively("check_memory"):
            self._gate.require_ready()
            self._refuse_moved(self._watch.moved())

    def stats(self) -> RunnerStats:
        """Return how often each bucket was used since the last capture, from any thread."""
        counts = self._counts  # once, since a capture in another thread replaces it
        return RunnerStats(
            tuple(
                BucketStats(batch_size=size, hits=hits, rows=rows)
                for size, (hits, rows) in counts.items()
            )
        )

    def invalidate(self, why: str) -> None:
        """Refuse runs until the next capture, for instance because weights have moved.

        Without captured graphs there is nothing to refuse, and nothing happens.

        Args:
            why: the reason, which the refusals show.

        Raises:
            ValueError: when the reason is empty.
            BusyError: when a capture or run is under way.
        """
        if not why:
            raise ValueError("why: got an empty string, expected the reason")
        with self._gate.exclusively("invalidate"):
            if self._graphs:
                self._gate.invalidate(f"the captured graphs are out of date: {why}")

    def close(self) -> None:
        """Wait for the last run, release the graphs, then their memory pool; again does nothing.

        In a fork of the process nothing is released: the graphs are the parent's.

        Raises:
            BusyError: when a capture or run is under way, also of another runner of the same pool.
        """
        if self._gate.is_fork:
            self._gate.close()
            return
        with self._gate.exclusively("close"):
            if not self._gate.is_closed:
                self._release()
                self._backend.close()
                self._gate.close()

    def __enter__(self) -> GraphRunner[OutputT]:
        """Return the runner, which is closed on exit."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close the runner."""
        self.close()

    def _capture(
        self, sizes: tuple[int, ...], progress: bool, verify: bool, audit: Audit
    ) -> CaptureReport:
        self._release()
        if self._group is not None:
            # Ranks whose step communicates must warm up and capture in step with each other.
            torch.distributed.barrier(group=self._group)
        try:
            graphs, report = capture_graphs(
                self._step,
                self._buffers,
                self._backend,
                sizes,
                auditor=self._auditor,
                progress=progress,
                verify=verify,
                audit=audit,
            )
        except CaptureError as error:
            cause = error.__cause__
            if isinstance(cause, BusyError) and cause.busy is self:
                raise cause from None
            raise
        self._watch = MemoryWatch(self._memory)
        self._graphs = graphs
        self._batch_sizes = self._last_batch_sizes = sizes
        self._counts = dict.fromkeys(sizes, (0, 0))
        self._gate.open()
        return report

    def _release(self) -> None:
        graphs = list(self._graphs.values())
        self._graphs.clear()
        self._batch_sizes = ()
        self._counts = {}
        self._gate.empty()
        if graphs:
            self._backend.release(graphs)

    def _refuse_moved(self, name: str | None) -> None:
        if name is not None:
            raise self._gate.invalidate(
                f"{name} has moved since the capture, which has its address"
            )


def _check_audit(audit: object) -> None:
    if audit not in AUDITS:
        raise ValueError(f"audit: got {audit!r}, expected one of {list(AUDITS)}")


def _make_backend(
    device: torch.device, pool: PoolHandle | None, stream: torch.cuda.Stream | None
) -> Backend:
    if device.type == "cuda":
        return CudaBackend(device, pool, stream)
    for name, value in (("pool", pool), ("stream", stream)):
        if value is not None:
            raise ValueError(f"{name}: got {value!r}, expected None for buffers on {device}")
    return CpuBackend()
