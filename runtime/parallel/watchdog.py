"""Signs of life among ranks: who is lost, who was first to say so, and the end of who hangs."""

from __future__ import annotations

import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import CodeType, FrameType
from typing import Any

from torch import distributed

from ostinato.graphs.errors import GraphError, RankError
from ostinato.graphs.process_group import CaptureGroup, declare_lost, describe, lost_ranks

from ..ops import CommunicatorError
from ..ops.collective import communicator as collectives
from .processes import WatchedProcess

EXIT_CODE = 1  # of a process that is ended because it hangs
_TICK_S = 0.05
_ANSWER_S = 2.0  # for the store to say who was lost first, before this rank says so by itself
_COLLECTIVES = collectives.__file__
_TORCHS = os.path.dirname(distributed.__file__)
_LEFT = -1  # instead of a rank's sign of life, once it has closed
_TOO_EARLY = "has left, while another rank waits for it"
_MEETING = CaptureGroup._wait.__code__
# What torch says where a collective ends because of another rank.
_OTHERS_FAULT = re.compile("gloo|nccl|connection|timed out|store|socket|peer", re.IGNORECASE)


class Watchdog:
    """Two threads that look after the ranks of a group.

    One writes this rank's sign of life into the store and reads those of the others; as that may
    block where the store's host hangs, the other one judges, and ends this process when it hangs.

    - A rank whose process ends, unless it has closed, is lost at once where it is on this host.
    - A rank that has closed is lost where another goes on to wait for it.
    - A rank that gives no sign of life for half of `timeout_s` is lost.
    - A rank that is in one call of `working` for all of `timeout_s` is lost, if no other rank has
      got less far.

    All ranks agree on what is said first: it ends every meeting and wait of every rank with the
    same RankError. From then on a process has another half of `timeout_s` to come out of whatever
    it is in (a collective, a wait for the device) and `close`; then it is ended, with exit code 1.

    Args:
        store: of all ranks, on a connection that is not used elsewhere.
        rank: this one.
        processes: the others, by rank.
        timeout_s: seconds within which all have ended, whatever happens to one of them.
        store_rank: the rank whose process holds the store; None where no rank does.

    Attributes:
        waits: whether this rank waits for the others on the host, so that it does not hang itself.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        processes: Mapping[int, WatchedProcess],
        timeout_s: float,
        store_rank: int | None,
    ) -> None:
        self._store = store
        self._rank = rank
        self._processes = processes
        self._timeout_s = timeout_s
        self._silence_s = timeout_s / 2
        self._store_rank = store_rank
        self._captures: Any = None  # where captures look for lost ranks
        self._is_mirrored = False
        now = time.monotonic()
        self._signs = dict.fromkeys(processes, "")
        self._heard = dict.fromkeys(processes, now)
        self._left: dict[int, float] = {}  # when that was heard of each
        self._answered = now  # when the store did, last
        self._progress = 0
        self._busy_since: float | None = None
        self._busy_thread = 0
        self.waits = False
        self._leaving_since: float | None = None
        self._suspects: dict[int, str] = {}
        self._suspected_since = now
        self._settling = threading.Lock()
        self._failures: dict[int, str] | None = None
        self._failed_at = now
        self._failed = threading.Event()
        self._look = threading.Event()
        self._closed = threading.Event()
        self._listeners: list[Callable[[RankError], None]] = []
        self._threads = [
            threading.Thread(target=target, name=name, daemon=True)
            for target, name in ((self._signal, "signs of life"), (self._judge, "watchdog"))
        ]
        for thread in self._threads:
            thread.start()

    @property
    def failure(self) -> RankError | None:
        """The error that ends all ranks, once a rank is lost."""
        if self._failures is None:
            return None
        return RankError(describe(self._failures), self._failures)

    def check(self) -> None:
        """Raise RankError once a rank is lost."""
        if self._failures is not None:
            raise RankError(describe(self._failures), self._failures)

    def on_failure(self, listener: Callable[[RankError], None]) -> None:
        """Have a thread call a listener when a rank is lost, or now if one is."""
        with self._settling:
            self._listeners.append(listener)
            failure = self.failure
        if failure is not None:
            listener(failure)

    @contextmanager
    def working(self) -> Iterator[None]:
        """A call that takes no longer than `timeout_s` unless a rank hangs."""
        self._progress += 1
        self._busy_since, self._busy_thread = time.monotonic(), threading.get_ident()
        try:
            yield
        finally:
            self._busy_since = None
            self._progress += 1

    def went_on(self) -> None:
        """Note that a call of `working` has got further."""
        self._progress += 1

    def tell(self, failures: Mapping[int, str]) -> RankError:
        """Say that ranks are lost, and return the error that all ranks agree on."""
        try:
            told = declare_lost(self._store, failures)
        except RuntimeError:  # the store is gone: what was known before is first
            told = dict(failures)
        self._settle(told)
        with suppress(RuntimeError):
            self._mirror()
        failure = self.failure
        assert failure is not None
        return failure

    def end_captures_in(self, store: Any) -> None:
        """Have lost ranks end the captures of a group, too.

        Args:
            store: of the group, from `shared_store`, on a connection of its own.
        """
        self._captures = store
        self._is_mirrored = False

    def blame(self, error: BaseException) -> RankError | None:
        """Tell the other ranks of an error of this one, unless it is because of another rank.

        Returns:
            The error to raise instead, where another rank was lost first.
        """
        named = error.failures if isinstance(error, RankError) else {}
        consequence = is_of_others(error) or any(map(_OTHERS_FAULT.search, named.values()))
        if consequence or named:
            # The other's end is found by the threads: at once, or when it has been silent.
            self._look.set()
            self.waits = True
            self._failed.wait(self._silence_s + _ANSWER_S if consequence else _ANSWER_S)
            self.waits = False
        failures = {rank: f"failed: {what}" for rank, what in named.items()}
        told = self.failure or self.tell(failures or {self._rank: _failed(error)})
        if isinstance(error, RankError):
            return told
        # An error of this rank's own says more to its caller.
        is_own = not consequence or told.failures.get(self._rank) == _failed(error)
        return None if is_own else told

    def leave(self) -> None:
        """Note that this process ends by itself, and need not be ended soon."""
        self._leaving_since = time.monotonic()

    def close(self) -> None:
        """Leave: from now on this rank may end, and hears nothing."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._look.set()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(_ANSWER_S)
        for process in self._processes.values():
            process.close()

    def wait_for_others(self, seconds: float) -> None:
        """Wait until all others have left or are lost: the store's process must be the last."""
        started = time.monotonic()
        while (waited := time.monotonic() - started) < seconds:
            # A lost rank may live, and read why it is given up.
            lost = self._failures if self._failures and waited > _ANSWER_S else {}
            gone = {*self._left, *lost}
            if all(r in gone or p.ended for r, p in self._processes.items()):
                return
            self._look.set()
            time.sleep(_TICK_S)

    def _signal(self) -> None:
        pause = min(0.5, self._silence_s / 16)
        while not self._closed.is_set():
            self._look.wait(pause)
            self._look.clear()
            try:
                self._exchange()
            except RuntimeError:
                self._closed.wait(_TICK_S)  # the judge finds who holds it, or that it is silent
        with suppress(RuntimeError):  # it is gone, and so is everybody who would read this
            self._store.set(f"alive/{self._rank}", json.dumps([_LEFT, 0, False]))

    def _exchange(self) -> None:
        store, ranks = self._store, list(self._processes)
        sign = [time.monotonic_ns(), *self._place()]
        store.set(f"alive/{self._rank}", json.dumps(sign))
        told = lost_ranks(store)
        if told:
            self._settle(told)
            self._mirror()
        signs = store.multi_get([f"alive/{rank}" for rank in ranks])
        now = time.monotonic()
        for rank, sign in zip(ranks, signs, strict=True):
            text = sign.decode()
            if text != self._signs[rank]:
                self._signs[rank], self._heard[rank] = text, now
            if json.loads(text)[0] == _LEFT:
                self._left.setdefault(rank, now)
        self._answered = now
        suspects = {
            r: what
            for r, what in self._suspects.items()
            if r not in self._left or what == _TOO_EARLY
        }
        if suspects and self._failures is None:
            self._settle(declare_lost(store, suspects))

    def _place(self) -> tuple[int, bool]:
        """Return how far this rank has got, and whether it waits for others, as in a collective."""
        frame = None
        if self._busy_since is not None:
            frame = sys._current_frames().get(self._busy_thread)
        waits = any(code.co_filename == _COLLECTIVES for code in _codes(frame))
        return self._progress, self.waits or waits

    def _mirror(self) -> None:
        if self._captures is not None and self._failures is not None and not self._is_mirrored:
            declare_lost(self._captures, self._failures)
            self._is_mirrored = True

    def _judge(self) -> None:
        last = time.monotonic()
        while not self._closed.wait(_TICK_S):
            now = time.monotonic()
            if now - last > self._silence_s / 2:
                # This process itself did not run: it cannot say how long the others were silent.
                self._heard = dict.fromkeys(self._heard, now)
                self._answered = now
            last = now
            if self._failures is not None:
                if now - (self._leaving_since or self._failed_at) > self._silence_s:
                    self._end()
                continue
            suspects = self._suspicions(now)
            if suspects and not self._suspects:
                self._suspects, self._suspected_since = suspects, now
                self._look.set()
            elif not suspects:
                self._suspects = {}
            elif now - self._suspected_since > max(_ANSWER_S, self._silence_s / 4):
                self._settle(self._suspects, self._suspected_since)

    def _suspicions(self, now: float) -> dict[int, str]:
        if early := self._left_too_early(now):
            return early
        here = {r: p for r, p in self._processes.items() if r not in self._left}
        ended = {r: f"has ended: process {p.pid}" for r, p in here.items() if p.ended}
        if ended:
            return ended
        silent = {
            rank: f"gave no sign of life for {now - self._heard[rank]:.0f} s"
            for rank in here
            if now - self._heard[rank] > self._silence_s
        }
        if now - self._answered > self._silence_s:  # then nobody's sign can be read
            if self._store_rank is None:
                return {self._rank: "does not reach the store of the group"}
            return {self._store_rank: "holds the store of the group and does not answer"}
        if silent or self._busy_since is None or now - self._busy_since <= self._timeout_s:
            return silent
        got = {rank: tuple(json.loads(self._signs[rank])[1:]) for rank in here if self._signs[rank]}
        got[self._rank] = self._place()
        least = min(got.values())
        stuck = f"has been in one step for {self._timeout_s:g} s"
        return {rank: stuck for rank, progress in got.items() if progress == least}

    def _left_too_early(self, now: float) -> dict[int, str]:
        """Return the ranks that have left although this one does not, and waits for them."""
        early = {rank: _TOO_EARLY for rank, at in self._left.items() if now - at > _ANSWER_S}
        if not early or self._leaving_since is not None:
            return {}
        return early if self.waits or self._is_in_a_meeting() else {}

    def _is_in_a_meeting(self) -> bool:
        """Return whether a thread of this process waits for others in a capture."""
        frames = [*sys._current_frames().values()]
        return any(code is _MEETING for frame in frames for code in _codes(frame))

    def _settle(self, failures: Mapping[int, str], since: float | None = None) -> None:
        """Take ranks for lost, as all others do.

        Args:
            failures: what happened to each.
            since: from when on this process has half a timeout to come out of what it is in.
        """
        with self._settling:
            if self._failures is not None:
                return
            self._failed_at = time.monotonic() if since is None else since
            self._failures = dict(failures)
            listeners, failure = list(self._listeners), self.failure
        self._failed.set()
        assert failure is not None
        for listener in listeners:
            # In a thread each: the judge must go on, whatever a listener waits for.
            threading.Thread(target=listener, args=(failure,), daemon=True).start()

    def _end(self) -> None:
        print(
            f"rank {self._rank}: {self.failure}\nand this process did not come out of what it was "
            f"in for {self._silence_s:g} s: it ends",
            file=sys.stderr,
            flush=True,
        )
        os._exit(EXIT_CODE)  # no exit handler: they would wait for the same


def _codes(frame: FrameType | None) -> Iterator[CodeType]:
    """Yield the code that a frame runs, and of all that have called it."""
    while frame is not None:
        yield frame.f_code
        frame = frame.f_back


def is_of_others(error: BaseException) -> bool:
    """Whether an error may come from a collective or a store, because of another rank."""
    if isinstance(error, GraphError) and error.__cause__ is not None:
        return is_of_others(error.__cause__)  # of a capture that it has ended
    if isinstance(error, distributed.DistError | CommunicatorError):
        return True
    words = type(error) is RuntimeError and _OTHERS_FAULT.search(str(error)) is not None
    return words and _comes_from_a_collective(error)


def _comes_from_a_collective(error: BaseException) -> bool:
    """Return whether an error came out of a collective, or nobody knows where it came from."""
    at = error.__traceback__
    if at is None:
        return True
    while at is not None:
        file = at.tb_frame.f_code.co_filename
        if file == _COLLECTIVES or file.startswith(_TORCHS):
            return True
        at = at.tb_next
    return False


def _failed(error: BaseException) -> str:
    return f"failed: {type(error).__name__}: {error}"
