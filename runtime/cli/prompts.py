"""The sources of prompts for `generate`."""

from __future__ import annotations

import sys
from argparse import ArgumentTypeError
from collections.abc import Sequence
from pathlib import Path

from .command import UserError, as_utf8, user_errors

STDIN = "-"


def read_prompts(arguments: Sequence[str], file: str | None) -> list[str]:
    """Return the prompts of the arguments, of a file, or of standard input.

    Standard input is read when "-" is the only argument or the file, or when neither is given
    and it is not a terminal. A file has one prompt per line; blank lines are skipped.

    Raises:
        UserError: when two sources are given or none, one cannot be read, has no prompt, or is
            not UTF-8.
    """
    if arguments and file is not None:
        raise UserError("got prompts both as arguments and in --prompts-file, expected one of them")
    if not arguments and file is None and sys.stdin.isatty():
        raise UserError("got no prompt, expected one as argument, in --prompts-file or on stdin")
    if arguments and list(arguments) != [STDIN]:
        return [_prompt(number, text) for number, text in enumerate(arguments, start=1)]
    if file is None or file == STDIN:
        return _lines(sys.stdin.buffer.read(), "stdin")
    with user_errors():
        content = Path(file).read_bytes()
    return _lines(content, file)


def _lines(content: bytes, source: str) -> list[str]:
    try:
        text = content.decode("utf-8-sig")  # editors may begin a file with a byte order mark
    except UnicodeDecodeError as error:
        raise UserError(f"{source}: got {error}, expected UTF-8") from error
    # Not splitlines(): it also breaks at form feeds and U+2028, which a prompt may contain.
    prompts = [line.removesuffix("\r") for line in text.split("\n") if line.strip()]
    if not prompts:
        raise UserError(f"{source}: got no prompt, expected one per line")
    return prompts


def _prompt(number: int, text: str) -> str:
    try:
        return as_utf8(text)
    except ArgumentTypeError as error:
        raise UserError(f"prompt {number}: {error}") from error
