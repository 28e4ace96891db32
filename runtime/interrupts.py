"""Ctrl-C between two changes, never in the middle of one."""

from __future__ import annotations

import functools
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

# Of two that come sooner one after the other the second is none: launchers send one as well.
APART_S = 0.5


class Uninterrupted:
    """A `with` block that Ctrl-C does not end half done: KeyboardInterrupt comes when it has ended.

    A second Ctrl-C is not held back, since what the block waits for may never come. Blocks within
    blocks are one. Nothing is done where Ctrl-C does not raise KeyboardInterrupt: in other threads
    than the main one, and where somebody has set another handler of SIGINT. (Of handlers that were
    set past Python's `signal`, as `faulthandler.register` does, it does not know.)
    """

    def __init__(self) -> None:
        self._active = False
        self._held_since: float | None = None

    def __enter__(self) -> None:
        if threading.get_ident() != threading.main_thread().ident:
            return
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            try:
                signal.signal(signal.SIGINT, self._hold)
            except ValueError:  # Python is a guest: the program has another main thread
                return
            self._active = True

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if not self._active:
            return
        self._active = False
        if signal.getsignal(signal.SIGINT) == self._hold:  # or the block has set another
            signal.signal(signal.SIGINT, signal.default_int_handler)
        # Only now: one may have come in the line before.
        if self._held_since is not None:
            raise KeyboardInterrupt

    def _hold(self, _number: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._held_since is None:
            self._held_since = now
        elif now - self._held_since >= APART_S:
            self._held_since = None
            # Here, since it may be `__exit__` that does not come to it any more.
            signal.signal(signal.SIGINT, signal.default_int_handler)
            raise KeyboardInterrupt


def uninterrupted(method: Callable[P, T]) -> Callable[P, T]:
    """Make all of a method such a block."""

    @functools.wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        with Uninterrupted():
            return method(*args, **kwargs)

    return call
