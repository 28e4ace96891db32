"""The driver's log of errors: what it has to say beyond an error code."""

from __future__ import annotations

import ctypes
import re
from typing import Any

_BYTES = 32 * 1024  # more than the driver keeps


class DriverLog:
    """Reads what the driver has logged since a moment; nothing where it keeps no log.

    The log is read afterwards (CUDA 12.9 and later) and not followed by a callback: the driver
    would call that with a lock held, and a thread that waits for this one to let go of Python's
    lock would then stop both.

    Args:
        library: the driver library.
    """

    def __init__(self, library: Any) -> None:
        self._current: Any = getattr(library, "cuLogsCurrent", None)
        self._dump: Any = getattr(library, "cuLogsDumpToMemory", None)
        self._position: ctypes.c_uint | None = None

    def mark(self) -> None:
        """Begin here."""
        position = ctypes.c_uint()
        available = self._current is not None and self._dump is not None
        failed = not available or self._current(ctypes.byref(position), ctypes.c_uint(0))
        self._position = None if failed else position

    def since_mark(self) -> tuple[str, ...]:
        """Return the messages since `mark`, without time and thread, repeated ones once."""
        if self._position is None or self._dump is None:
            return ()
        text, size = ctypes.create_string_buffer(_BYTES), ctypes.c_size_t(_BYTES)
        position = ctypes.c_uint(self._position.value)
        if self._dump(ctypes.byref(position), text, ctypes.byref(size), ctypes.c_uint(0)):
            return ()
        lines = text.value.decode(errors="replace").splitlines()
        return tuple(dict.fromkeys(message for line in lines if (message := _message(line))))


def _message(line: str) -> str:
    """Return a line of the log without its time, thread, source and severity."""
    return re.sub(r"^(\[[^\]]*\]){4}", "", line).strip()
