"""Waits for a call that may never come back, and that nothing can end."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


class NotInTimeError(Exception):
    """A call has not come back."""


def in_time(call: Callable[[], T], seconds: float) -> T:
    """Return what a call returns, or raise what it raises.

    It runs in a thread of its own, which is left behind where it does not come back: torch waits in
    C++ for a store that has accepted a connection and is silent. Ctrl-C is heard meanwhile.

    Raises:
        NotInTimeError: when it has not come back in so many seconds.
    """
    found: list[tuple[Any, BaseException | None]] = []
    ended = threading.Event()

    def run() -> None:
        try:
            found.append((call(), None))
        except BaseException as error:
            found.append((None, error))
        ended.set()

    threading.Thread(target=run, name="start of ranks", daemon=True).start()
    if not ended.wait(seconds):
        raise NotInTimeError
    value, error = found[0]
    if error is not None:
        raise error
    result: T = value
    return result
