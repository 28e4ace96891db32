"""The gate of a runner: which of its calls may proceed, in which process, thread and state."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ostinato.graphs.backend import Backend
from ostinato.graphs.errors import (
    AsleepError,
    BusyError,
    CaptureError,
    ClosedError,
    GraphError,
    InvalidatedError,
    NotCapturedError,
)
from ostinato.graphs.guards import ProcessGuard

_Refusal = tuple[type[GraphError], str]
_NOT_CAPTURED: _Refusal = (
    NotCapturedError,
    "nothing has been captured: call capture() first",
)
_ASLEEP: _Refusal = (AsleepError, "the runner is asleep, without its graphs: call wake()")
_CLOSED: _Refusal = (ClosedError, "the runner is closed: make a new GraphRunner")


class Gate:
    """Lets one call at a time through, in the process it was made in, and runs when there are any.

    Args:
        owner: the runner whose calls these are.
        backend: knows whose turn it is in its memory pool, and where nothing may be run.
    """

    def __init__(self, owner: object, backend: Backend) -> None:
        self._owner = owner
        self._backend = backend
        self._process = ProcessGuard()
        self._refusal: _Refusal | None = _NOT_CAPTURED
        self._closing = 0  # calls of `close` under way, in as many threads
        self._counting = threading.Lock()

    @property
    def is_fork(self) -> bool:
        """Whether this is a fork of the process that the gate was made in."""
        return self._process.is_fork

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._refusal is _CLOSED

    @property
    def is_asleep(self) -> bool:
        """Whether `sleep` was called last."""
        return self._refusal is _ASLEEP

    def enter(self, what: str, timeout_s: float = 0.0, *, is_run: bool = False) -> None:
        """Take the turn for the call `what`; `leave` must follow. See `Turn.begin`.

        Raises:
            ForkedError, BusyError: when the call may not proceed.
        """
        self._process.check()
        self._backend.turn.begin(self._owner, what, timeout_s, is_run=is_run)
        try:
            self._backend.check_idle()
        except BaseException:
            self._backend.turn.end()
            raise

    def leave(self) -> None:
        """Give the turn back."""
        self._backend.turn.end()

    def detach(self) -> None:
        """Keep the turn after the call; `leave` may follow in any thread."""
        self._backend.turn.detach()

    @contextmanager
    def exclusively(self, what: str) -> Iterator[None]:
        """Take the turn for the call `what`.

        Raises:
            ForkedError, BusyError: when the call may not proceed.
        """
        self.enter(what)
        try:
            yield
        finally:
            self.leave()

    @contextmanager
    def closing(
        self, timeout_s: float, end: Callable[[float], float] | None = None
    ) -> Iterator[None]:
        """Refuse further calls, wait for the one under way, and take the turn.

        Args:
            timeout_s: wait so long at most.
            end: ends what may be under way by itself, given `timeout_s`; returns what is left.

        Raises:
            BusyError: when it takes longer than `timeout_s`, is one of this thread, or the
                caller's stream is being captured; calls are admitted as before then.
        """
        self._count(1)
        try:
            if end is not None:
                timeout_s = end(timeout_s)
            self.enter("close", timeout_s)
            try:
                yield
            finally:
                self.leave()
        finally:
            self._count(-1)

    def _count(self, closing: int) -> None:
        with self._counting:
            self._closing += closing
        self._backend.turn.count_closing(closing)

    def require_ready(self) -> None:
        """Raise the reason, with the remedy, for which nothing can be run now."""
        if self._closing:
            raise ClosedError(_CLOSED[1])
        if self._refusal is not None:
            kind, message = self._refusal
            raise kind(message)

    def require_open(self) -> None:
        """Raise ClosedError after `close`."""
        if self._closing or self.is_closed:
            raise ClosedError(_CLOSED[1])

    def raise_own(self, error: BaseException) -> None:
        """Raise what this runner refused to the step, where that is why a capture has failed."""
        cause = error.__cause__
        if not isinstance(error, CaptureError) or not isinstance(cause, BusyError):
            return
        if cause.busy is self._owner:
            raise cause from None

    def open(self) -> None:
        """Admit runs: there are graphs."""
        self._refusal = None

    def empty(self) -> None:
        """Refuse runs: there are no graphs."""
        self._refusal = _NOT_CAPTURED

    def sleep(self) -> None:
        """Refuse runs: the graphs are released for a while."""
        self._refusal = _ASLEEP

    def invalidate(self, why: str) -> InvalidatedError:
        """Refuse runs until the next capture; return the error that says so."""
        self._backend.turn.forget()
        self._refusal = (InvalidatedError, f"{why}; call recapture()")
        return InvalidatedError(self._refusal[1])

    def close(self) -> None:
        """Refuse everything, for good."""
        self._refusal = _CLOSED
