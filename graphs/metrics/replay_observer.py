"""What a runner measures and marks of its replays, where it is asked to."""

from __future__ import annotations

import threading

import torch

from ..errors import GraphError
from ..graph import Graph, ReplayTimer
from ..graph_key import Key
from ..guards import ProcessGuard
from .histogram import Histogram, HistogramBuilder


class ReplayObserver:
    """Replays graphs under watch.

    Args:
        timer: of replays; None times none.
        nvtx: whether replays are ranges in a profile.

    Raises:
        GraphError: when this torch has no NVTX.
    """

    def __init__(self, timer: ReplayTimer | None, *, nvtx: bool) -> None:
        if nvtx:
            _check_nvtx()
        self._timer = timer
        self._nvtx = nvtx
        self._times = HistogramBuilder()
        # Statistics may be asked for by any thread, also by the step. It is never held in a replay,
        # but a signal handler may ask where this thread holds it.
        self._lock = threading.RLock()
        self._process = ProcessGuard()
        self._collecting = False

    def replay(self, key: Key, graph: Graph) -> None:
        """Replay a graph."""
        if self._nvtx:
            torch.cuda.nvtx.range_push(f"replay {key}")
        try:
            if self._timer is None:
                graph.replay()
                return
            # Where another thread collects the times now, this one need not wait for it.
            if self._lock.acquire(blocking=False):
                try:
                    self._collect(self._timer)
                finally:
                    self._lock.release()
            if not self._timer.replay(graph):
                with self._lock:
                    self._times.missed += 1
        finally:
            if self._nvtx:
                torch.cuda.nvtx.range_pop()

    def replay_us(self) -> Histogram | None:
        """Return the times of the replays that have ended; None where none are timed.

        In a fork of the process these are the times that were collected before it.
        """
        if self._timer is None:
            return None
        if self._process.is_fork:  # without the lock, which a thread of the parent may hold
            return self._times.build()
        with self._lock:
            self._collect(self._timer)
            return self._times.build()

    def _collect(self, timer: ReplayTimer) -> None:
        if self._collecting:  # this is a signal handler, in the midst of the block below
            return
        try:
            self._collecting = True
            for microseconds in timer.finished():
                self._times.add(microseconds)
        finally:
            self._collecting = False


def _check_nvtx() -> None:
    try:
        torch.cuda.nvtx.range_push("check")
        torch.cuda.nvtx.range_pop()
    except RuntimeError as error:
        raise GraphError(f"nvtx: this torch has none: {error}") from error
