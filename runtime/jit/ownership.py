"""Opens files of the cache that only the user and root can change.

The code of a library runs as soon as it is loaded, so that whoever can change it can do whatever
the user can. Folders above the cache are not looked at: what is opened is checked itself, by its
descriptor, and stays what was checked when a path leads elsewhere meanwhile.
"""

from __future__ import annotations

import os
import shlex
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .errors import KernelCacheError

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_ROOT = 0


@contextmanager
def opened(
    path: Path,
    within: int | None = None,
    *,
    cache: Path | None = None,
    installed: bool = False,
) -> Iterator[int]:
    """Open a folder or a file for reading; gives its descriptor.

    Args:
        path: of the file. It may be a link unless `within` is given.
        within: descriptor of the folder that holds it.
        cache: the folder that an error names as to be changed; `path` by default.
        installed: whether it is of an installed package, whose owner and mode are not checked.

    Raises:
        KernelCacheError: when it belongs to another user than this one and root, or its group or
            others can write to it. The error names the remedy.
        OSError: when it cannot be opened.
    """
    # Without O_NONBLOCK to open a pipe waits until somebody writes to it.
    flags = os.O_RDONLY | os.O_NONBLOCK
    if within is None:
        descriptor = os.open(path, flags)
    else:
        descriptor = os.open(path.name, flags | os.O_NOFOLLOW, dir_fd=within)
    try:
        if not installed:
            _check(os.fstat(descriptor), path, shlex.quote(str(cache or path)))
        yield descriptor
    finally:
        os.close(descriptor)


def keep_to_owner(path: Path) -> None:
    """Take from a file of the user's what its group and others may write, whatever the umask."""
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & _OTHERS_WRITE:
        path.chmod(mode & ~_OTHERS_WRITE)


def _check(state: os.stat_result, path: Path, cache: str) -> None:
    user = os.geteuid()
    trust = "set OSTINATO_CACHE to another folder or, if you trust all that is in this one, run"
    if state.st_uid not in (user, _ROOT):
        raise KernelCacheError(
            f"{path}: belongs to user {state.st_uid}, expected user {user} or root, since its code "
            f"would run as user {user}: {trust} `chown -R {user} {cache}`"
        )
    if state.st_mode & _OTHERS_WRITE:
        raise KernelCacheError(
            f"{path}: got mode {stat.S_IMODE(state.st_mode):04o}, expected one by which only its "
            f"owner can write, since its code would run as user {user}: {trust} "
            f"`chmod -R go-w {cache}`"
        )
