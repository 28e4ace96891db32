"""Opens the files of a checkpoint folder: regular ones, of bounded size.

The folder comes from a stranger. Opening a FIFO blocks until somebody writes to it, opening a
device may do anything, and neither ends.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO

from .errors import CheckpointError

MAX_CONFIG_BYTES = 16 << 20
MAX_INDEX_BYTES = 100 << 20  # of a million tensors
MAX_TOKENIZER_BYTES = 256 << 20

_PIECE_BYTES = 1 << 18
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def open_regular(file: Path) -> BinaryIO:
    """Open a regular file for reading, without waiting for anybody.

    Raises:
        CheckpointError: naming the file, when it is missing or something else.
    """
    try:
        # Before it is opened: that alone may change a device.
        status = os.stat(file)
        if not stat.S_ISREG(status.st_mode):
            kind = _KINDS.get(stat.S_IFMT(status.st_mode), "a special file")
            raise CheckpointError(f"{file}: got {kind}, expected a regular file")
        return open(file, "rb", opener=_open_at_once)
    except OSError as error:
        raise unreadable(file, error) from error


def read_bytes(file: Path, most: int) -> bytes:
    """Return the contents of a regular file.

    Raises:
        CheckpointError: naming the file, when it cannot be read or holds more than `most` bytes.
    """
    content = bytearray()
    with open_regular(file) as stream:
        size = os.fstat(stream.fileno()).st_size
        try:
            # Counted, since files of /proc hold more than they say.
            while max(size, len(content)) <= most and (piece := stream.read(_PIECE_BYTES)):
                content += piece
        except OSError as error:
            raise unreadable(file, error) from error
    if max(size, len(content)) > most:
        raise CheckpointError(f"{file}: got more than {_size(most)}, expected at most that")
    return bytes(content)


def read_text(file: Path, most: int) -> str:
    """Return the contents of a regular file in UTF-8; see `read_bytes`."""
    try:
        return read_bytes(file, most).decode("utf-8")
    except UnicodeDecodeError as error:
        raise unreadable(file, error) from error


def unreadable(file: str | Path, error: Exception) -> CheckpointError:
    """Return the error of a file that the system or its encoding does not let be read."""
    return CheckpointError(f"{file}: cannot be read: {error}")


def is_there(file: Path) -> bool:
    """Return whether a folder has an entry of this name, be it a link to nowhere."""
    return os.path.lexists(file)


def _open_at_once(file: str, flags: int) -> int:
    return os.open(file, flags | os.O_NONBLOCK)


def _size(count: int) -> str:
    return f"{count >> 20} MiB" if count >= 1 << 20 else f"{count >> 10} KiB"
