"""Ctrl-C between two changes, never in the middle of one."""

from __future__ import annotations

import functools
import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class Uninterrupted:
    """A `with` block that Ctrl-C does not end half done: it comes when the block has ended.

    What the handler of SIGINT does, to raise KeyboardInterrupt or whatever else, it does then. A
    second Ctrl-C is not held back, since what the block waits for may never come. Blocks within
    blocks are one. In other threads than the main one, which are not interrupted, it does nothing.
    """

    def __init__(self) -> None:
        self._handler: Callable[[int, FrameType | None], Any] | None = None
        self._held = False

    def __enter__(self) -> None:
        if threading.get_ident() != threading.main_thread().ident:
            return
        handler = signal.getsignal(signal.SIGINT)
        # Not one that ignores it, nor one of C's, nor that of a block around this one.
        if callable(handler) and not isinstance(getattr(handler, "__self__", None), Uninterrupted):
            self._handler = handler
            signal.signal(signal.SIGINT, self._hold)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        handler, self._handler = self._handler, None
        if handler is None:
            return
        signal.signal(signal.SIGINT, handler)
        if self._held:
            self._held = False
            handler(signal.SIGINT, None)

    def _hold(self, number: int, frame: FrameType | None) -> None:
        handler = self._handler
        if self._held and handler is not None:
            self._held = False
            handler(number, frame)
        else:
            self._held = True


def uninterrupted(method: Callable[P, T]) -> Callable[P, T]:
    """Make all of a method such a block."""

    @functools.wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        with Uninterrupted():
            return method(*args, **kwargs)

    return call
