"""The lifecycle of a runner: which of its calls may proceed, in which process, thread and state."""

from __future__ import annotations

import weakref

from ._native import PendingCloses, RunLockGuard
from .backends.base import Backend
from .errors import (
    AsleepError,
    BusyError,
    CaptureError,
    ClosedError,
    GraphError,
    InvalidatedError,
    NotCapturedError,
)
from .guards import ProcessGuard

_Refusal = tuple[type[GraphError], str]
_NOT_CAPTURED: _Refusal = (
    NotCapturedError,
    "nothing has been captured: call capture() first",
)
_ASLEEP: _Refusal = (AsleepError, "the runner is asleep, without its graphs: call wake()")
_CLOSED: _Refusal = (ClosedError, "the runner is closed: make a new GraphRunner")


class Lifecycle:
    """Lets one call at a time through, in the process it was made in, and runs when there are any.

    Args:
        owner: the runner whose calls these are.
        backend: knows who holds the run lock in its memory pool, and where nothing may be run.

    Attributes:
        closing: of calls of `close`, each in a `with` statement, in which other calls are refused.
    """

    def __init__(self, owner: object, backend: Backend) -> None:
        # No cycle: memory of a runner that is gone must not wait for the garbage collector.
        self._owner = weakref.ref(owner)
        self._backend = backend
        self._process = ProcessGuard()
        self._refusal: _Refusal | None = _NOT_CAPTURED
        self.closing = PendingCloses(backend.run_lock)

    @property
    def is_fork(self) -> bool:
        """Whether this is a fork of the process that the lifecycle was made in."""
        return self._process.is_fork

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._refusal is _CLOSED

    @property
    def is_asleep(self) -> bool:
        """Whether `sleep` was called last."""
        return self._refusal is _ASLEEP

    def exclusively(
        self, what: str, timeout_s: float = 0.0, *, is_run: bool = False
    ) -> RunLockGuard:
        """Return what holds the run lock for the call `what`, as `RunLock.hold` does.

        Raises:
            ForkedError: when the call may not proceed; the statement raises BusyError.
        """
        self._process.check()
        run_lock, check = self._backend.run_lock, self._backend.check_idle
        return run_lock.hold(self._owner(), what, timeout_s, is_run=is_run, check=check)

    def require_ready(self) -> None:
        """Raise the reason, with the remedy, for which nothing can be run now."""
        if self.closing:
            raise ClosedError(_CLOSED[1])
        if self._refusal is not None:
            kind, message = self._refusal
            raise kind(message)

    def require_open(self) -> None:
        """Raise ClosedError after `close`."""
        if self.closing or self.is_closed:
            raise ClosedError(_CLOSED[1])

    def raise_own(self, error: BaseException) -> None:
        """Raise what this runner refused to the step, where that is why a capture has failed."""
        cause = error.__cause__
        if not isinstance(error, CaptureError) or not isinstance(cause, BusyError):
            return
        if cause.busy is self._owner():
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
        self._backend.run_lock.forget()
        self._refusal = (InvalidatedError, f"{why}; call recapture()")
        return InvalidatedError(self._refusal[1])

    def close(self) -> None:
        """Refuse everything, for good."""
        self._refusal = _CLOSED
