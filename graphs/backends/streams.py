"""The order of replays among streams: all work in one pool follows, whichever stream it is given.

Replays are given to the caller's current stream. Replays of one pool overwrite each other's memory,
so that one on another stream than the last waits for whatever the last one's stream has been given.
"""

from __future__ import annotations

from collections import deque
from contextlib import AbstractContextManager
from types import TracebackType

import torch

from ..graph import Graph
from ..guards import RunLock

_TIMED = 64  # replays whose times are not known yet


class CallerOrder:
    """Orders the caller's stream after that of the call before.

    Args:
        device: of the streams.
        run_lock: which all runners of the pool share.
    """

    def __init__(self, device: torch.device, run_lock: RunLock) -> None:
        self._device = device
        self._index = device.index
        self._run_lock = run_lock

    def follow(self) -> bool:
        """Let the caller's current stream wait for the last one, if it is another.

        Returns:
            Whether `passed` has something to do: the stream is foreign.
        """
        handle = torch._C._cuda_getCurrentRawStream(self._index)
        # The handle of a foreign stream that is gone may be that of a new one.
        if handle != self._run_lock.last_handle or self._run_lock.last_event is not None:
            stream = torch.cuda.current_stream(self._device)
            self.wait_for_last(stream)
            self._run_lock.last, self._run_lock.last_handle = stream, handle
            self._run_lock.last_is_foreign = _is_foreign(stream)
            self._run_lock.last_stream = -1 if self._run_lock.last_is_foreign else handle
        return self._run_lock.last_is_foreign

    def passed(self) -> None:
        """Note that the call has been given to the stream, which may be gone at the next one.

        Torch's own streams live as long as the process, so that an event of theirs can be made
        when another stream comes.
        """
        if self._run_lock.last is not None and self._run_lock.last_is_foreign:
            self._run_lock.last_event = self._run_lock.last.record_event()

    def wait_for_last(self, stream: torch.cuda.Stream) -> None:
        """Let `stream` wait for the last call, on whichever stream it was."""
        last, event = self._run_lock.last, self._run_lock.last_event
        if event is not None:
            stream.wait_event(event)
        elif last is not None:
            stream.wait_stream(last)
        self._run_lock.last_event = None

    def forget(self) -> None:
        """Forget the last call, which has been waited for."""
        run_lock = self._run_lock
        run_lock.last, run_lock.last_handle, run_lock.last_event = None, -1, None
        run_lock.last_stream = -1


class StreamScope(AbstractContextManager[None]):
    """Makes a stream current between two events that order it with the caller's stream.

    Entered many times, so that its events are made once.
    """

    def __init__(self, stream: torch.cuda.Stream, order: CallerOrder) -> None:
        self._stream = stream
        self._order = order
        self._current = torch.cuda.stream(stream)
        self._ready = torch.cuda.Event()
        self._done = torch.cuda.Event()
        self._caller = stream
        self._is_foreign = False

    def __enter__(self) -> None:
        self._is_foreign = self._order.follow()
        self._caller = torch.cuda.current_stream(self._stream.device)
        self._ready.record(self._caller)
        self._stream.wait_event(self._ready)
        self._current.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._current.__exit__(kind, error, traceback)
        self._done.record(self._stream)
        self._caller.wait_event(self._done)
        if self._is_foreign:
            self._order.passed()


class EventTimer:
    """Times replays by pairs of events on the caller's stream, a limited number at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free = [
            tuple(torch.cuda.Event(enable_timing=True) for _ in range(2)) for _ in range(_TIMED)
        ]
        self._pending: deque[tuple[torch.cuda.Event, ...]] = deque()

    def replay(self, graph: Graph) -> bool:
        """Replay; return whether the replay is timed."""
        if not self._free:
            graph.replay()
            return False
        start, end = self._free.pop()
        stream = torch.cuda.current_stream(self._device)
        start.record(stream)
        graph.replay()
        end.record(stream)
        self._pending.append((start, end))
        return True

    def finished(self) -> list[float]:
        """Return the microseconds of timed replays that have ended since the last call."""
        times = []
        while self._pending and self._pending[0][1].query():
            start, end = self._pending.popleft()
            times.append(1e3 * start.elapsed_time(end))
            self._free.append((start, end))
        return times


def _is_foreign(stream: torch.cuda.Stream) -> bool:
    """Return whether somebody else made the stream: its id is then its address, which is even."""
    return stream.stream_id != 0 and stream.stream_id % 2 == 0
