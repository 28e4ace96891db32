"""The gate of a runner: which of its calls may proceed, in which process, thread and state."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ostinato.graphs.backend import Backend
from ostinato.graphs.errors import ClosedError, GraphError, InvalidatedError, NotCapturedError
from ostinato.graphs.guards import ProcessGuard

_Refusal = tuple[type[GraphError], str]
_NOT_CAPTURED: _Refusal = (
    NotCapturedError,
    "nothing has been captured: call capture() first",
)
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

    @property
    def is_fork(self) -> bool:
        """Whether this is a fork of the process that the gate was made in."""
        return self._process.is_fork()

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._refusal is _CLOSED

    @contextmanager
    def exclusively(self, what: str) -> Iterator[None]:
        """Take the turn for the call `what`.

        Raises:
            ForkedError, BusyError: when the call may not proceed.
        """
        self._process.check()
        self._backend.turn.begin(self._owner, what)
        try:
            self._backend.check_idle()
            yield
        finally:
            self._backend.turn.end()

    def require_ready(self) -> None:
        """Raise the reason, with the remedy, for which nothing can be run now."""
        if self._refusal is not None:
            kind, message = self._refusal
            raise kind(message)

    def require_open(self) -> None:
        """Raise ClosedError after `close`."""
        if self.is_closed:
            raise ClosedError(_CLOSED[1])

    def open(self) -> None:
        """Admit runs: there are graphs."""
        self._refusal = None

    def empty(self) -> None:
        """Refuse runs: there are no graphs."""
        self._refusal = _NOT_CAPTURED

    def invalidate(self, why: str) -> InvalidatedError:
        """Refuse runs until the next capture; return the error that says so."""
        self._refusal = (InvalidatedError, f"{why}; call recapture()")
        return InvalidatedError(self._refusal[1])

    def close(self) -> None:
        """Refuse everything, for good."""
        self._refusal = _CLOSED
