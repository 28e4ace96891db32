"""A process that answers lines of text, and is killed where it takes too long."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
import weakref
from collections.abc import Mapping
from enum import Enum, auto
from pathlib import Path
from typing import IO

_PIECE = 1 << 20


class Silence(Enum):
    """Why there is no answer."""

    UNREAD = auto()  # the process did not take the line in time
    GONE = auto()  # it had ended before it was asked
    LATE = auto()  # no answer in time
    ENDED = auto()  # it ended instead of answering
    LONG = auto()  # the answer is larger than allowed


class NoAnswerError(Exception):
    """A process has not answered; it has to be ended, since it may still do."""

    def __init__(self, reason: Silence) -> None:
        super().__init__(reason.name)
        self.reason = reason


def import_path() -> str:
    """Return the PYTHONPATH of a process that imports from where this one does."""
    return os.pathsep.join(folder for folder in sys.path if os.path.isabs(folder))


class LineProcess:
    """A Python program that reads lines from standard input and answers each with a line.

    Args:
        program: its file. It imports from where this process does, not from the current folder.
        env: its environment, to which PYTHONPATH is added.
        quiet: whether what it writes to standard error is dropped.
    """

    def __init__(self, program: Path, env: Mapping[str, str], *, quiet: bool = False) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-s", str(program)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if quiet else None,
            env={**env, "PYTHONPATH": import_path()},
            start_new_session=True,  # Ctrl-C is for its parent
        )
        os.set_blocking(self._pipes[0].fileno(), False)  # see the deadline of `ask`
        # A process that nobody can ask any more would wait for ever: Popen keeps its input open.
        weakref.finalize(self, self._process.kill).atexit = False  # its input is closed then

    @property
    def _pipes(self) -> tuple[IO[bytes], IO[bytes]]:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        return stdin, stdout

    def ask(self, line: bytes, seconds: float, *, most_bytes: int | None = None) -> bytes:
        """Return the answer to a line, both without their ends.

        Args:
            line: without a line break.
            seconds: for writing and answering.
            most_bytes: of the answer; None for any number.

        Raises:
            NoAnswerError: saying why there is none.
        """
        stdin, stdout = self._pipes
        deadline = time.monotonic() + seconds
        left = memoryview(line + b"\n")
        while left:
            if not _ready(stdin, select.POLLOUT, deadline):
                raise NoAnswerError(Silence.UNREAD)
            try:
                left = left[os.write(stdin.fileno(), left) :]
            except BrokenPipeError:
                raise NoAnswerError(Silence.GONE) from None
        answer = bytearray()
        while not answer.endswith(b"\n"):
            if not _ready(stdout, select.POLLIN, deadline):
                raise NoAnswerError(Silence.LATE)
            piece = os.read(stdout.fileno(), _PIECE)
            if not piece:
                raise NoAnswerError(Silence.ENDED)
            answer += piece
            if most_bytes is not None and len(answer) > most_bytes:
                raise NoAnswerError(Silence.LONG)
        return bytes(answer[:-1])

    def kill(self) -> None:
        """Kill the process, also while another thread asks it, which is told that it has ended."""
        self._process.kill()

    def end(self) -> None:
        """Kill the process and wait for its end."""
        self._process.kill()
        self._process.wait()
        for pipe in self._pipes:
            pipe.close()


def _ready(pipe: IO[bytes], event: int, deadline: float) -> bool:
    """Wait until a pipe can be read or written, or has been closed; return whether it is so."""
    poll = select.poll()  # which knows more files than select, as a server may have
    poll.register(pipe, event)
    return bool(poll.poll(max(0.0, deadline - time.monotonic()) * 1000))
