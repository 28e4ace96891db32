"""Ctrl-C as a question instead of an exception."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from ..interrupts import APART_S

INTERRUPTED = 128 + signal.SIGINT  # what a shell reports for a program that SIGINT ended


@contextmanager
def deferred_interrupt() -> Iterator[Callable[[], bool]]:
    """Yield a function that tells whether Ctrl-C was pressed.

    An exception raised in the middle of an engine step would leave its bookkeeping half done,
    and partial texts could not be asked for. A second Ctrl-C raises `KeyboardInterrupt`, for when
    a step takes too long.
    """
    pressed: float | None = None

    def remember(_signal: int, _frame: FrameType | None) -> None:
        nonlocal pressed
        now = time.monotonic()
        if pressed is not None and now - pressed >= APART_S:
            raise KeyboardInterrupt
        pressed = now if pressed is None else pressed

    previous = signal.signal(signal.SIGINT, remember)
    try:
        yield lambda: pressed is not None
    finally:
        signal.signal(signal.SIGINT, previous)
