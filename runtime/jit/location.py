"""Where the cache is, and a hold on it that outlasts a change of its path."""

from __future__ import annotations

import os
import threading
from functools import cache
from pathlib import Path

from .errors import KernelCacheError
from .ownership import opened

_VARIABLE = "OSTINATO_CACHE"

_held: dict[Path, int] = {}
_holding = threading.Lock()


def cache_folder() -> Path:
    """Return where compiled libraries are kept: OSTINATO_CACHE, else below the XDG cache.

    A relative OSTINATO_CACHE starts at the folder that is the current one when this process asks
    for it first.

    Raises:
        KernelCacheError: when it is below the home of a user who has none.
    """
    chosen = os.environ.get(_VARIABLE)
    if chosen:
        folder = _expanded(Path(chosen), f"got {chosen!r}")
        return folder if folder.is_absolute() else _below_first_folder(str(folder))
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # A relative one is to be ignored, as its specification says.
    if not base.is_absolute():
        base = _expanded(Path("~/.cache"), "got none")
        if not base.is_absolute():
            raise KernelCacheError(f"HOME: got {os.environ['HOME']!r}, expected an absolute path")
    return base / "ostinato" / "kernels"


def create_cache_folder(folder: Path) -> None:
    """Make the cache's folder, for its owner alone, unless it is there.

    Raises:
        OSError: when it cannot be made.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)


def held_cache(folder: Path) -> int:
    """Return a descriptor of the cache's folder, which stays open for the life of the process.

    Libraries are loaded by names below it. The loader knows them by name: one that is closed would
    give its number, and with it the name, to another cache.

    Raises:
        KernelCacheError: when others than the user and root can change it.
        OSError: when it cannot be opened.
    """
    with opened(folder) as descriptor, _holding:
        held = _held.get(folder)
        if held is None or not _is_same(held, descriptor):
            held = _held[folder] = os.dup(descriptor)
        return held


def _is_same(held: int, descriptor: int) -> bool:
    # Somebody may have closed it, as daemons do with all that they inherit: then its number is free
    # or another file's, the one just opened perhaps.
    try:
        return held != descriptor and os.path.samestat(os.fstat(held), os.fstat(descriptor))
    except OSError:
        return False


def _expanded(path: Path, got: str) -> Path:
    try:
        return path.expanduser()
    except RuntimeError as error:
        who = path.parts[0] if path.parts[0] != "~" else f"user {os.getuid()}"
        raise KernelCacheError(
            f"{_VARIABLE}: {got}, expected an absolute path, since {who} has no home folder"
        ) from error


@cache
def _below_first_folder(relative: str) -> Path:
    try:
        return Path(relative).absolute()
    except FileNotFoundError as error:
        raise KernelCacheError(
            f"{_VARIABLE}: got {relative!r}, expected an absolute path, since the current folder "
            "is gone"
        ) from error
