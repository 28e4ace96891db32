"""Notices the end of another process of this host, whoever's child it is."""

from __future__ import annotations

import os
import select
from contextlib import suppress
from typing import Any


def identity() -> dict[str, Any]:
    """Return what tells this process from all others, and where its number means something."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        boot = file.read().strip()
    return {"host": f"{boot} {os.readlink('/proc/self/ns/pid')}", "pid": os.getpid()}


class WatchedProcess:
    """Another process; `ended` is False for ever where it is on another host.

    Args:
        who: its `identity`.
    """

    def __init__(self, who: dict[str, Any]) -> None:
        self.pid: int = who["pid"]
        self._handle = -1
        self._is_gone = False
        self.is_near = who["host"] == identity()["host"]
        if self.is_near:
            try:
                self._handle = os.pidfd_open(self.pid)
            except ProcessLookupError:
                self._is_gone = True
            except OSError:  # where a sandbox forbids it, signs of life must do
                self.is_near = False

    @property
    def ended(self) -> bool:
        """Whether it has ended, also if its parent has not asked for its exit code."""
        if self._handle < 0:
            return self._is_gone
        poll = select.poll()
        poll.register(self._handle, select.POLLIN)
        return bool(poll.poll(0))

    def close(self) -> None:
        """Stop watching."""
        with suppress(OSError):
            os.close(self._handle)
        self._handle = -1
