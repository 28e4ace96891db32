"""A new folder that appears whole or not at all."""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..interrupts import Uninterrupted
from .termination import Terminated, terminated_after_cleanup
from .writer import force_to_disk


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Yield an empty folder beside `target`; at the end of the block it gets the target's name.

    It is forced to disk before. Nothing is left after an exception, nor where SIGINT, SIGTERM or
    SIGHUP ends the process. What a run that was killed in another way has left is removed by the
    next one for the same target; a warning names what cannot be removed.
    """
    with terminated_after_cleanup():
        for leftover in _leftovers(target):
            _remove_unless_locked(leftover)
        folder, lock = _make(target)
        try:
            yield folder
            for path in (*folder.rglob("*"), folder):
                force_to_disk(path)
            folder.rename(target)
        finally:
            # After the rename there is nothing here; before it, everything must go.
            _clear(folder)
            os.close(lock)
        force_to_disk(target.parent)


def _make(target: Path) -> tuple[Path, int]:
    """Return a new folder and the descriptor whose lock says that this process is alive."""
    while True:
        # Beside the target, so that the rename stays within one file system.
        folder = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
        folder.mkdir()
        try:
            lock = _lock(folder)
        except (BlockingIOError, FileNotFoundError):
            continue  # before it was locked, another run took it for a leftover
        if folder.exists():
            return folder, lock
        os.close(lock)


def _lock(folder: Path, *, required: bool = False) -> int:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        # Some file systems have no locks: there nothing is removed that may be in use.
        if required or isinstance(error, BlockingIOError):
            os.close(descriptor)
            raise
    return descriptor


def _leftovers(target: Path) -> list[Path]:
    name = re.compile(rf"\.{re.escape(target.name)}\.[0-9a-f]{{8}}\.tmp")
    return [
        path
        for path in target.parent.iterdir()
        if name.fullmatch(path.name) and path.is_dir() and not path.is_symlink()
    ]


def _remove_unless_locked(folder: Path) -> None:
    try:
        lock = _lock(folder, required=True)
        try:
            shutil.rmtree(folder)
        finally:
            os.close(lock)
    except BlockingIOError:
        return  # of a run that goes on
    except OSError as error:
        if folder.exists():
            warnings.warn(
                f"{folder}: left by a run that was killed, or in use by another; it is not "
                f"removed: {error}",
                stacklevel=2,
            )


def _clear(folder: Path) -> None:
    with Uninterrupted():
        try:
            shutil.rmtree(folder, ignore_errors=True)
        except Terminated:  # which comes once
            shutil.rmtree(folder, ignore_errors=True)
            raise
