"""Shared by all commands: their shape, their parser, and the report of a user's mistake."""

from __future__ import annotations

import argparse
import errno
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from ..model_path import PathError, find_folder

FAILED = 1  # the exit code of a command whose work has failed
# A full disk, a quota, a limit on a file's size, a terminal that is gone.
NO_MORE_IS_WRITTEN = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


class UserError(Exception):
    """A mistake of the user: shown as one line, without a traceback; exit code 2."""


class Parser(argparse.ArgumentParser):
    """An argument parser that raises `UserError` where argparse prints its usage and exits."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (see --help)")


@dataclass(frozen=True)
class Command:
    """A command: `summary` for the list of commands; `main` takes its arguments, gives the code."""

    summary: str
    main: Callable[[Sequence[str]], int]


@contextmanager
def user_errors(*types: type[Exception]) -> Iterator[None]:
    """Report these errors as the user's; by default those of bad values and bad paths.

    The default is for set-up only: a `ValueError` in the middle of the work is a bug of ours,
    whose traceback belongs in the bug report.
    """
    expected = types or (ValueError, OSError)
    try:
        yield
    except BrokenPipeError:
        raise
    except expected as error:
        raise UserError(_one_line(error)) from error


def find_model(argument: str, path: str | Path, *files: str, weights: bool = True) -> Path:
    """Return the folder of a checkpoint, before torch is imported for it; see `find_folder`.

    Args:
        argument: which names the path.
        path: as it was given.
        files: that the command reads, besides config.json.
        weights: whether the command reads the weights.
    """
    try:
        return find_folder(path, "config.json", *files, weights=weights)
    except PathError as error:
        raise UserError(f"{argument}: {error}") from error


def as_utf8(text: str) -> str:
    """Return a text of the command line in UTF-8; argparse takes it as a type.

    In an ASCII locale Python hands on each byte that it cannot decode as a lone surrogate.

    Raises:
        argparse.ArgumentTypeError: when its bytes are no UTF-8.
    """
    try:
        return text.encode(errors="surrogateescape").decode()
    except UnicodeError:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected UTF-8") from None


def check_folder(flag: str, path: Path | None) -> None:
    """Check that the file which a flag names, if it does, can be made: that its folder is there."""
    if path is None:
        return
    if not path.absolute().parent.is_dir():
        raise UserError(f"{flag}: {path.parent} is not a folder")
    if path.is_dir():
        raise UserError(f"{flag}: {path} is a folder, expected a file")


def comma_separated(text: str) -> list[int]:
    """Parse "1,2,4" for argparse; an empty text is an empty list."""
    try:
        return [int(item) for item in text.split(",")] if text else []
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"got {text!r}, expected integers separated by commas"
        ) from None


def _one_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror and error.filename:
        return f"{error.filename}: {error.strerror}"
    if isinstance(error, MemoryError) and not str(error):
        return "out of memory"
    lines = [line.strip() for line in str(error).splitlines()]
    return " ".join(filter(None, lines)) or type(error).__name__
