"""How steps are run, captured and replayed on one device."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

from .._native import FastReplay
from ..buffers import BatchView
from ..failures import Failure, Trace
from ..graph import Graph, ReplayTimer
from ..guards import RunLock
from ..inspect.inspector import Inspector
from ..loop.burst import LoopMaker
from ..outputs import Step
from ..process_group import CaptureGroup


class Backend(LoopMaker, Protocol):
    """How steps are run, captured and replayed on one device.

    Methods are called inside `scope`; but `check_idle`, `follow`, `replay_timer`, `release`,
    `leave_pool` and `close` outside of it. `Graph.replay` is called inside it, or after `follow`.
    """

    @property
    def name(self) -> str:
        """The device's name, as a person knows it."""

    @property
    def run_lock(self) -> RunLock:
        """Who holds the run lock among the runners that share the graphs' memory."""

    @property
    def inspector(self) -> Inspector:
        """What reads its graphs and the memory they use."""

    def check_idle(self) -> None:
        """Raise BusyError where nothing may be run: the caller is capturing a graph itself."""

    def fast_replay(self) -> FastReplay:
        """Return what repeats runs here; see `CapturedStep`."""

    def scope(self) -> AbstractContextManager[None]:
        """Enter the place where everything runs, ordered after and before the caller's work."""

    def synchronize(self) -> None:
        """Wait for what has been run in `scope`."""

    def is_idle(self) -> bool:
        """Return whether all that was run in `scope` has ended, without waiting; also by errors."""

    def prepare_captures(self, *, into_pool: bool) -> None:
        """Make ready for a series of captures, after their warm-up.

        Args:
            into_pool: whether they come into the pool of the last series, beside its graphs.
        """

    def finish_captures(self) -> None:
        """End the series after its last call of the step, or when it has failed."""

    def capture(self, step: Step, batch: BatchView) -> Graph:
        """Capture one call of the step. A step that raises leaves the backend usable."""

    def failure(self, step: Step, batch: BatchView) -> Failure:
        """Return what is known of the `capture` that has just failed, for the same arguments.

        The step may be called once more, in a capture that is thrown away.
        """

    def trace(self, step: Step, batch: BatchView) -> Trace | None:
        """Watch the step in a capture that is thrown away; None where nothing is recorded."""

    def replay_us(self, graph: Graph, group: CaptureGroup) -> float | None:
        """Replay a few times and return the median in µs; None where nothing is recorded.

        All ranks replay equally often.

        Raises:
            RankError: when another rank has failed.
        """

    def replay_timer(self) -> ReplayTimer:
        """Return what times replays in the midst of serving."""

    def release(self, graphs: list[Graph]) -> None:
        """Give back the graphs, emptying the list, and their memory.

        First wait for replays, and for what the caller's stream does with their outputs.
        """

    def leave_pool(self) -> None:
        """Give back the pool after its last graph, unless it is the caller's."""

    def close(self) -> None:
        """Let go of what is held between captures."""
