"""GraphRunner: captures a step once per batch size, and replays it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import Generic

import torch

from .arguments import as_integer, as_seconds
from .backends.autocast import require_no_autocast
from .backends.select import backend_for
from .buffers import BatchView, StaticBuffers
from .capture_plan import BatchSizes, CapturePlan, Misses
from .captured_step import CapturedStep, OutputT
from .declared_memory import DeclaredMemory, kept_alive
from .errors import BurstError, CaptureError, GraphError, NotCapturedError
from .graph_key import DEFAULT, Key, Variant, as_variant
from .graph_table import GraphTable
from .inspect.audit import AUDITS, Audit
from .inspect.cuda import PoolHandle
from .lifecycle import Lifecycle
from .loop.burst import Burst, Bursts, Stops
from .loop.rules import BurstRules
from .metrics.stats import RunnerStats
from .process_group import DEFAULT_TIMEOUT_S, CaptureGroup
from .report import CaptureReport


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
            per row of the batch. Named tuples, transformers' ModelOutput and other classes of
            tuples and dicts that `torch.utils._pytree` knows are returned by runs as such.
        buffers: the inputs, of this runner alone until it is closed; their device is the runner's.
        memory: what else the step works on and stays where it is: names such as "weights" and
            "cache" to modules or tensors, which are kept alive. The audit reports any other memory,
            and runs are refused when something of it has moved. By default the audit takes every
            live tensor for the step's own.
        pool: memory pool of the graphs, from `torch.cuda.graph_pool_handle()`; by default a new
            one for each capture. Runners that share a pool must share `stream` too. To capture into
            a given pool again, drop the outputs of earlier runs first. CUDA only.
        stream: where graphs are captured and verified; by default one of its own. CUDA only.
        group: processes whose steps communicate. They must make their runners in the same order,
            and capture the same batch sizes together; when one fails, all do.
        group_timeout_s: how long a capture waits for another process of the group.
        burst: how the step feeds itself, for `burst`.

    Raises:
        TypeError, ValueError: when an argument is of the wrong kind, or for another device, or the
            buffers are those of another runner that is neither closed nor dropped.
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
        group_timeout_s: float = DEFAULT_TIMEOUT_S,
        burst: BurstRules | None = None,
    ) -> None:
        if not callable(step):
            raise TypeError(f"step: got {type(step).__name__}, expected a callable")
        if not isinstance(buffers, StaticBuffers):
            raise TypeError(f"buffers: got {type(buffers).__name__}, expected StaticBuffers")
        if group is not None and not isinstance(group, torch.distributed.ProcessGroup):
            raise TypeError(f"group: got {type(group).__name__}, expected a ProcessGroup")
        self._buffers = buffers
        self._backend = backend_for(buffers.device, pool, stream)
        self._bursts = None if burst is None else Bursts(burst, buffers, self._backend)
        self._captured: CapturedStep[OutputT] = CapturedStep(
            step,
            buffers,
            self._backend,
            memory=None if memory is None else kept_alive(memory),
            group=CaptureGroup(group, group_timeout_s),
            bursts=self._bursts,
        )
        self._lifecycle = Lifecycle(self, self._backend)
        self._fast_replay = self._captured.fast_replay
        buffers.claim(self)  # last: nothing else may fail then

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """The captured batch sizes of the default variant, increasing; empty before a capture."""
        return self._captured.table.captured(DEFAULT)

    @property
    def keys(self) -> tuple[Key, ...]:
        """What there are graphs of now, by variant and increasing batch size."""
        return self._captured.table.keys()

    @property
    def max_batch_size(self) -> int:
        """The largest batch that can be run, of the default variant or else the first.

        Raises:
            GraphError: when nothing can be run; see `require_captured`.
        """
        return self._ready_table().max_batch_size

    def capture(
        self,
        batch_sizes: BatchSizes = None,
        *,
        misses: Misses | None = None,
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
                8, 16, 32, 64, the multiples of 128, and `max_batch`. Where the step has variants, a
                mapping of each `Variant` to its batch sizes.
            misses: what a run does for which no graph is captured; by default it is refused.
            progress: show a bar, where standard error is a terminal.
            verify: compare replays with the step, bit for bit.
            audit: "report" reads the graphs and reports their nodes and what may go wrong with
                them, where cuda-python is installed; "strict" refuses a graph with such a finding;
                "off" reads nothing.

        Raises:
            TypeError, ValueError: for bad batch sizes, with the corrected list, or another `audit`;
                nothing is changed then.
            CaptureError: when the step fails, or in `torch.autocast`; in that nothing is changed.
            AuditError: when a strict audit refuses a graph.
            BurstError: when there are `burst` rules, and the step cannot be repeated by them.
            GraphError: when a strict audit is impossible, for want of cuda-python.
            VerificationError: when a replay differs from the step.
            ClosedError, BusyError: see `run`.
        """
        _check_audit(audit)
        with self._lifecycle.exclusively("capture"):
            self._lifecycle.require_open()
            plan = CapturePlan.of(batch_sizes, misses, self._buffers.max_batch)
            return self._capture(plan, progress, verify, audit)

    def recapture(
        self, *, progress: bool = True, verify: bool = True, audit: Audit = "report"
    ) -> CaptureReport:
        """Repeat the last successful capture, for instance after new weights were loaded.

        Raises:
            NotCapturedError: when there was none.
            ValueError, GraphError: as `capture`.
        """
        _check_audit(audit)
        with self._lifecycle.exclusively("recapture"):
            self._lifecycle.require_open()
            if self._captured.plan is None:
                raise NotCapturedError("nothing has been captured: call capture() first")
            return self._capture(self._captured.plan, progress, verify, audit)

    def sleep(self) -> None:
        """Release the graphs and their memory to the driver, until `wake`; again does nothing.

        Waits for the last run. What a caller keeps of the outputs keeps its memory, and a `pool` of
        the caller's keeps what it has reserved. Buffers, weights and caches stay.

        Raises:
            GraphError: when nothing can be run; see `require_captured`.
            BusyError: when a capture or run is under way.
        """
        with self._lifecycle.exclusively("sleep"):
            if not self._lifecycle.is_asleep:
                self._lifecycle.require_ready()
                self._lifecycle.sleep()  # also when the release fails
                self._captured.release()

    def wake(
        self, *, progress: bool = True, verify: bool = True, audit: Audit = "report"
    ) -> CaptureReport:
        """Repeat the last capture after `sleep`. After a failure the runner is still asleep.

        Raises:
            GraphError: when the runner is not asleep.
            ValueError, CaptureError, AuditError, VerificationError, ClosedError, BusyError: as
                `capture`.
        """
        _check_audit(audit)
        with self._lifecycle.exclusively("wake"):
            self._lifecycle.require_open()
            if not self._lifecycle.is_asleep or self._captured.plan is None:
                raise GraphError("wake: the runner is not asleep")
            try:
                return self._capture(self._captured.plan, progress, verify, audit)
            except BaseException:
                self._lifecycle.sleep()
                raise

    def run(self, n: int, inputs: Mapping[str, object], *, variant: Variant = DEFAULT) -> OutputT:
        """Run the step on `n` rows and return the first `n` rows of its outputs.

        Never captures, unless `capture` was given `Misses("capture")`. On CUDA the call does not
        wait for the device, and everything is given to the caller's current stream; should the last
        run have been on another, this one waits for what that stream has been given.

        The outputs are views of memory that the next run, of any batch size, overwrites: use or
        copy them before.

        Args:
            n: rows, from 1 to `max_batch_size`.
            inputs: for each buffer `n` rows: a tensor on the CPU or the runner's device, of the
                buffer's dtype, or a sequence of numbers.
            variant: one of those captured.

        Raises:
            TypeError, ValueError: for a bad `n`, variant or input; nothing is changed then.
            NotCapturedError, InvalidatedError, AsleepError, ClosedError: when there is nothing to
                replay, or declared memory was seen to have moved; see `check_memory`.
            BusyError: when another capture or run of this runner is under way, or of one with the
                same pool, or the caller's current stream is being captured.
            ForkedError: in a fork of the process that the runner was made in.
            CaptureError, AuditError, VerificationError: when a graph that is missed cannot be
                captured; what is captured can still be run.
        """
        # Most runs are like one before. What is unusual about this one is found out below.
        repeated: OutputT | None = self._fast_replay.run(self, n, inputs, variant)
        if repeated is not None:
            return repeated
        with self._lifecycle.exclusively("run", is_run=True):
            self._lifecycle.require_ready()
            if self._captured.is_look_due():
                self._require_unmoved(self._captured.watch.look())
            try:
                return self._captured.run(as_integer("n", n), inputs, variant)
            except CaptureError as error:
                self._lifecycle.raise_own(error)
                raise

    def burst(
        self,
        n: int,
        inputs: Mapping[str, object],
        steps: int,
        *,
        limits: Sequence[int] | None = None,
        stops: Stops = (),
        variant: Variant = DEFAULT,
    ) -> Burst:
        """Take many steps in one launch, each on what the last one left; see `BurstRules`.

        A row ends with one of its stop tokens or at its limit, and is padding from then on; the
        burst ends with its last row. Tokens are those that as many calls of `run` would give, since
        `capture` refuses a step that writes to its input buffers where there are burst rules.
        Until the burst has ended and was read, every other call but `close`, which cancels it, is
        refused.

        Args:
            n: rows, from 1 to `max_batch_size`.
            inputs: of the first step, as for `run`.
            steps: the most that are taken, at most the rules' `max_steps`.
            limits: the most tokens of each row; `steps` by default.
            stops: tokens that end a row: the same for all, or a list for each.
            variant: one of those captured.

        Raises:
            TypeError, ValueError: for a bad argument, or a row whose page table is too short for
                its limit; nothing is changed then.
            BurstError: without `burst` rules or a graph, or when no loop can hold the step.
            GraphError: as `run`.
        """
        with self._lifecycle.exclusively("burst") as hold:
            self._lifecycle.require_ready()
            if self._bursts is None:
                raise BurstError("the runner has no rules: GraphRunner(..., burst=BurstRules(...))")
            self._require_unmoved(self._captured.watch.look())
            n = as_integer("n", n)
            asked = self._bursts.check(n, steps, limits, stops)
            try:
                key, graph, inputs = self._captured.graph_for(n, inputs, variant)
            except CaptureError as error:
                self._lifecycle.raise_own(error)
                raise
            burst = self._bursts.start(graph, key, inputs, asked, hold.end)
            try:
                hold.detach()
                return burst
            except BaseException:
                burst.close()  # which nobody has
                raise

    def bucket_for(self, n: int, variant: Variant = DEFAULT) -> int:
        """Return the batch size that a run of `n` rows would have.

        Raises:
            TypeError, ValueError: for a bad `n` or variant.
            GraphError: when nothing can be run; see `require_captured`.
        """
        return self._ready_table().find(as_integer("n", n), variant).key.batch_size

    def require_captured(self) -> None:
        """Raise what `run` would raise now if there is nothing to replay.

        Raises:
            NotCapturedError, InvalidatedError, AsleepError, ClosedError: with the remedy.
        """
        self._lifecycle.require_ready()

    def dump(
        self, batch_size: int, path: str | PathLike[str], *, variant: Variant = DEFAULT
    ) -> None:
        """Write a captured graph as a drawing that Graphviz's `dot` reads.

        Raises:
            TypeError, ValueError: when there is no graph of the batch size and variant.
            GraphError: when nothing can be run (see `require_captured`), cuda-python is missing, or
                nothing was recorded, as on a CPU.
            BusyError: when a capture or run is under way.
        """
        with self._lifecycle.exclusively("dump"):
            self._lifecycle.require_ready()
            key = Key(as_integer("batch_size", batch_size), as_variant("variant", variant))
            drawing = self._captured.drawing(key)
            Path(path).write_text(drawing, encoding="utf-8")

    def check_memory(self) -> None:
        """Look at all declared memory; runs look at a few tensors of it in turn.

        Raises:
            InvalidatedError: when a tensor is not where it was at the capture. Runs are refused
                from then on.
            GraphError: when nothing can be run; see `require_captured`.
        """
        with self._lifecycle.exclusively("check_memory"):
            self._lifecycle.require_ready()
            self._require_unmoved(self._captured.watch.moved())

    def observe(self, *, replay_times: bool = False, nvtx: bool = False) -> None:
        """Choose what is measured of runs from now on; by default nothing, at no cost.

        Args:
            replay_times: time replays on the device, for `stats().replay_us`. Two events more per
                run; up to 64 replays are timed at once, others not.
            nvtx: mark replays as ranges named after their batch size, for profilers.

        Raises:
            GraphError: when this torch has no NVTX.
            BusyError: when a capture or run is under way.
        """
        with self._lifecycle.exclusively("observe"):
            self._lifecycle.require_open()
            self._captured.observe(replay_times=replay_times, nvtx=nvtx)

    def stats(self) -> RunnerStats:
        """Return how often each bucket was used since the last capture, from any thread."""
        return self._captured.stats()

    def invalidate(self, why: str) -> None:
        """Refuse runs until the next capture, for instance because weights have moved.

        Without captured graphs there is nothing to refuse, and nothing happens.

        Args:
            why: the reason, which the refusals show.

        Raises:
            TypeError, ValueError: when the reason is no text, or empty.
            BusyError: when a capture or run is under way.
        """
        if not isinstance(why, str):
            raise TypeError(f"why: got {why!r}, expected the reason, a str")
        if not why:
            raise ValueError("why: got an empty string, expected the reason")
        with self._lifecycle.exclusively("invalidate"):
            if self._captured.table.buckets:
                self._lifecycle.invalidate(f"the captured graphs are out of date: {why}")

    def close(self, *, timeout_s: float = 60.0) -> None:
        """Wait for the last run, release the graphs, then their memory pool; again does nothing.

        From here on other calls are refused, but `stats`, `keys`, `batch_sizes` and `invalidate`,
        which find no graphs. One that is under way in another thread, also of another runner of the
        same pool, is waited for; a burst is cancelled and read to its end. In a fork of the process
        nothing is released: the graphs are the parent's.

        Args:
            timeout_s: wait so long at most.

        Raises:
            TypeError, ValueError: when `timeout_s` is no number.
            BusyError: when the wait was too long, the call is one from inside the step, or the
                caller's current stream is being captured. But for the burst the runner is as
                before then: close it again.
        """
        timeout_s = as_seconds("timeout_s", timeout_s)
        if self._lifecycle.is_fork:
            self._lifecycle.close()
            self._buffers.release(self)
            return
        with self._lifecycle.closing:
            if self._bursts is not None:
                timeout_s = self._bursts.end_current(timeout_s)
            with self._lifecycle.exclusively("close", timeout_s):
                if not self._lifecycle.is_closed:
                    self._lifecycle.empty()  # also when the release fails
                    self._captured.release()
                    self._backend.close()
                    self._lifecycle.close()
                    self._buffers.release(self)

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
        self, plan: CapturePlan, progress: bool, verify: bool, audit: Audit
    ) -> CaptureReport:
        require_no_autocast(self._buffers.device.type)
        self._lifecycle.empty()
        try:
            report = self._captured.capture(plan, progress=progress, verify=verify, audit=audit)
        except CaptureError as error:
            self._lifecycle.raise_own(error)
            raise
        self._lifecycle.open()
        return report

    def _ready_table(self) -> GraphTable:
        """Return the graphs, where another thread may be about to release them."""
        while True:
            self._lifecycle.require_ready()
            table = self._captured.table
            if table.plan.served:
                return table

    def _require_unmoved(self, moved: str | None) -> None:
        if moved is not None:
            why = f"{moved} has moved since the capture, which has its address"
            raise self._lifecycle.invalidate(why)


def _check_audit(audit: object) -> None:
    if audit not in AUDITS:
        raise ValueError(f"audit: got {audit!r}, expected one of {list(AUDITS)}")
