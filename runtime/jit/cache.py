"""The folder of compiled kernel libraries. Entries appear whole; a damaged one counts as absent."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from .budgets import Usage

LIBRARY = "kernel.so"
_RECORD = "build.json"
_LOCK = "build.lock"
_UNFINISHED = "unfinished-"


@dataclass(frozen=True)
class Entry:
    """A compiled library: its folder, and what is known about its making.

    Args:
        folder: holds the library and the record.
        variant: name of the variant.
        target: the GPU it is for, such as sm_90a.
        mode: the build mode in words.
        nvcc: version of the compiler.
        seconds: that compiling took.
        size: bytes of the library, by which a damaged one is known.
        usage: what ptxas reports; zeros for PTX, which the driver compiles.
    """

    folder: Path
    variant: str
    target: str
    mode: str
    nvcc: str
    seconds: float
    size: int
    usage: Usage

    @property
    def library(self) -> Path:
        """The shared object."""
        return self.folder / LIBRARY

    @property
    def made_ns(self) -> int:
        """When it was made, by the clock of the file system; 0 where it is gone by now."""
        try:
            return self.folder.stat().st_mtime_ns
        except OSError:
            return 0

    @staticmethod
    def read(folder: Path) -> Entry | None:
        """Return the entry in a folder, None when it is absent, damaged or not to be read."""
        try:
            fields = json.loads((folder / _RECORD).read_text(encoding="utf-8"))
            entry = Entry(folder, usage=Usage.from_json(fields.pop("usage")), **fields)
            # To load a library that ends too early is no error, but a SIGBUS.
            whole = entry.library.stat().st_size == entry.size
        except (OSError, AttributeError, KeyError, TypeError, ValueError):
            return None
        return entry if whole else None


def cache_folder() -> Path:
    """Return where compiled libraries are kept: OSTINATO_CACHE, else below the XDG cache."""
    chosen = os.environ.get("OSTINATO_CACHE")
    if chosen:
        return Path(chosen).expanduser().absolute()
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # A relative one is to be ignored, as its specification says.
    return (base if base.is_absolute() else Path.home() / ".cache") / "ostinato" / "kernels"


@contextmanager
def exclusive_build(cache: Path) -> Iterator[Path]:
    """Be the only process that builds into this cache; gives an empty folder to build in.

    Others wait: two builds at once would compile the same kernels twice and share neither cores
    nor memory fairly. The lock is the kernel's own and ends with the process, however it ends;
    what a killed build left behind is removed here.

    Raises:
        OSError: when the cache cannot be written.
    """
    with _locked(cache):
        for left in cache.glob(f"{_UNFINISHED}*"):
            shutil.rmtree(left, ignore_errors=True)
        folder = Path(tempfile.mkdtemp(prefix=_UNFINISHED, dir=cache))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _locked(cache: Path) -> Iterator[None]:
    path = cache / _LOCK
    while True:
        cache.mkdir(parents=True, exist_ok=True)
        try:
            lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except PermissionError:  # another user's, which can be locked all the same
            lock = os.open(path, os.O_RDONLY)
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                print(
                    f"ostinato: waiting for another build in {cache}", file=sys.stderr, flush=True
                )
                fcntl.flock(lock, fcntl.LOCK_EX)
            if not _is_at(lock, path):
                continue  # removed meanwhile, with the cache for example: others have a new one
            try:
                yield
            finally:
                # Closing would leave it to processes that were forked meanwhile.
                fcntl.flock(lock, fcntl.LOCK_UN)
            return
        finally:
            os.close(lock)


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def publish(entry: Entry, built: Path) -> None:
    """Move a finished library into the cache, at `entry.folder`, in one step.

    A whole entry that is there already is kept, a damaged one is removed before. To be called by
    the only process that builds.

    Args:
        entry: what to record.
        built: the library, in a folder of its own on the cache's file system.

    Raises:
        OSError: when the disk is full; the cache is then as it was.
    """
    fields = {name: value for name, value in asdict(entry).items() if name != "folder"}
    record = built.parent / _RECORD
    record.write_text(json.dumps(fields, indent=1) + "\n", encoding="utf-8")
    for path in (built, record, built.parent):
        _flush(path)
    try:
        os.rename(built.parent, entry.folder)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise
        # A whole one is equal to ours: names are hashes of what is in them.
        if Entry.read(entry.folder) is None:
            if entry.folder.is_dir() and not entry.folder.is_symlink():
                shutil.rmtree(entry.folder)
            else:
                entry.folder.unlink()
            os.rename(built.parent, entry.folder)
    _flush(entry.folder.parent)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
