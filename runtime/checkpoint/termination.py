"""SIGTERM and SIGHUP as an exception, so that what a process has begun is cleaned up."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


class Terminated(BaseException):
    """A signal that ends the process as soon as its `finally` blocks have run."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


@contextmanager
def terminated_after_cleanup() -> Iterator[None]:
    """Let `finally` blocks inside run before SIGTERM or SIGHUP ends the process, as it would.

    It raises `Terminated` inside the block. Further ones do not disturb the clean-up. Nothing is
    done in other threads than the main one, and where the signal has a handler or is ignored.
    """
    if threading.get_ident() != threading.main_thread().ident:
        yield
        return
    caught = [number for number in _SIGNALS if signal.getsignal(number) is signal.SIG_DFL]

    def end(number: int, _frame: FrameType | None) -> None:
        for other in caught:
            signal.signal(other, signal.SIG_IGN)
        raise Terminated(number)

    for number in caught:
        signal.signal(number, end)
    try:
        yield
    except Terminated as error:
        signal.signal(error.number, signal.SIG_DFL)
        signal.raise_signal(error.number)
    finally:
        for number in caught:
            signal.signal(number, signal.SIG_DFL)
