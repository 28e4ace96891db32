"""The entries of the cache. They appear whole; a damaged one counts as absent.

None is read that others than the user and root can change (see `ownership`), but those of an
installed package.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from .budgets import Usage
from .errors import KernelCacheError
from .installed import installed_folder
from .location import create_cache_folder, held_cache
from .ownership import keep_to_owner, opened

LIBRARY = "kernel.so"
_RECORD = "build.json"
_LOCK = "build.lock"
_LONGEST_RECORD = 1 << 20
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
        sha256: of the library, in hexadecimal digits; by it a damaged one is known.
        usage: what ptxas reports; zeros for PTX, which the driver compiles.
    """

    folder: Path
    variant: str
    target: str
    mode: str
    nvcc: str
    seconds: float
    sha256: str
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
        """Return the entry in a folder, None when it is absent, damaged or not to be read.

        Links count as damage: what they lead to may change without a trace in the cache.

        Raises:
            KernelCacheError: when others than the user and root can change the cache, the folder or
                a file of the entry.
        """
        try:
            with _opened_entry(folder) as (record, library):
                fields = json.loads(os.read(record, _LONGEST_RECORD))
                entry = Entry(folder, usage=Usage.from_json(fields.pop("usage")), **fields)
                whole = _has_its_types(entry) and file_sha256(library) == entry.sha256
        except (OSError, AttributeError, KeyError, TypeError, ValueError, RecursionError):
            return None
        return entry if whole else None


def pinned_library(entry: Entry) -> str:
    """Return a path that leads to an entry's library even when the cache's own leads elsewhere.

    An installed package stays where it is.

    Raises:
        KernelCacheError: as `Entry.read`, or when the entry is gone.
    """
    if entry.folder.parent == installed_folder():
        return str(entry.library)
    try:
        cache = held_cache(entry.folder.parent)
        with _opened_entry(entry.folder, cache):
            return f"/proc/self/fd/{cache}/{entry.folder.name}/{LIBRARY}"
    except OSError as error:
        raise KernelCacheError(f"{entry.library}: cannot be opened: {error.strerror}") from error


def file_sha256(file: Path | int) -> str:
    """Return the hash of a file's content, in hexadecimal digits; a descriptor stays open."""
    with open(file, "rb", closefd=isinstance(file, Path)) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


@contextmanager
def _opened_entry(folder: Path, cache: int | None = None) -> Iterator[tuple[int, int]]:
    """Open the record and the library of an entry, in the open cache if one is given."""
    installed = folder.parent == installed_folder()
    with ExitStack() as stack:
        if cache is None:
            cache = stack.enter_context(opened(folder.parent, installed=installed))

        def open_below(path: Path, within: int) -> int:
            return stack.enter_context(
                opened(path, within, cache=folder.parent, installed=installed)
            )

        inside = open_below(folder, cache)
        yield open_below(folder / _RECORD, inside), open_below(folder / LIBRARY, inside)


def _has_its_types(entry: Entry) -> bool:
    texts = (entry.variant, entry.target, entry.mode, entry.nvcc, entry.sha256)
    return all(isinstance(text, str) for text in texts) and type(entry.seconds) in (int, float)


@contextmanager
def exclusive_build(cache: Path) -> Iterator[Path]:
    """Be the only process that builds into this cache; gives an empty folder to build in.

    Others wait: two builds at once would compile the same kernels twice and share neither cores
    nor memory fairly. The lock is the kernel's own and ends with the process, however it ends;
    what a killed build left behind is removed here.

    Raises:
        KernelCacheError: when others than the user and root can change the cache.
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
        create_cache_folder(cache)
        with opened(cache):
            pass
        try:
            lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        except PermissionError:  # root's, which can be locked all the same
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
        KernelCacheError: when others than the user and root can change what is there.
        OSError: when the disk is full; the cache is then as it was.
    """
    fields = {name: value for name, value in asdict(entry).items() if name != "folder"}
    record = built.parent / _RECORD
    record.write_text(json.dumps(fields, indent=1) + "\n", encoding="utf-8")
    for path in (built.parent, *built.parent.iterdir()):
        keep_to_owner(path)
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
