"""Matches names of modules against the regular expressions of a configuration.

The expressions come with a checkpoint, from people whom nobody knows. Python's `re` has no limit
on time; the `regex` package has, and means the same once its extensions are out of the way.
"""

from __future__ import annotations

import re
import time
from math import prod

import regex

from .errors import CheckpointError

_MATCH_SECONDS = 1.0  # of CPU time, for one pattern and one name
_TOTAL_SECONDS = 10.0  # of CPU time, for everything that a configuration asks for
# `regex` compiles some counted repeats to as many copies: length times counts bounds its memory.
_MAX_SIZE = 100_000
_COUNT = re.compile(r"\{(\d*),?(\d*)\}", re.ASCII)
# Braces that are no counts are plain characters to `re`, and fuzzy matching to `regex`.
_PLAIN_BRACE = re.compile(r"(\\.)|\{(?!(?:[0-9]+(?:,[0-9]*)?|,[0-9]*)\})", re.DOTALL)
_SHOWN = 80


class PatternMatcher:
    """Matches the regular expressions of one configuration, in the syntax of Python's `re`.

    A pattern may take 1 s of CPU time for a name, all calls together 10 s.

    Args:
        where: what the patterns come from, for messages.
    """

    def __init__(self, where: str) -> None:
        self._where = where
        self._seconds = 0.0
        self._compiled: dict[str, regex.Pattern[str]] = {}

    def matches(self, pattern: str, name: str) -> bool:
        """Return whether `pattern` matches the beginning of `name`.

        Raises:
            CheckpointError: naming the pattern, when it is no regular expression, is too large, or
                takes too long.
        """
        begin = time.thread_time()
        compiled = self._compiled.get(pattern)
        if compiled is None:
            compiled = self._compiled[pattern] = self._compile(pattern)
        try:
            found = compiled.match(name, timeout=_MATCH_SECONDS) is not None
        except (TimeoutError, MemoryError) as error:
            raise CheckpointError(
                f"{self._where}: {_shown(pattern)} takes more than {_MATCH_SECONDS:g} s to match "
                f"{name!r}; expected a pattern that does not backtrack so much"
            ) from error
        self._seconds += time.thread_time() - begin
        if self._seconds > _TOTAL_SECONDS:
            raise CheckpointError(
                f"{self._where}: its patterns take more than {_TOTAL_SECONDS:g} s to match the "
                f"names of modules; expected fewer or simpler ones"
            )
        return found

    def _compile(self, pattern: str) -> regex.Pattern[str]:
        size = len(pattern) * prod(max(1, *map(_number, c)) for c in _COUNT.findall(pattern))
        if size > _MAX_SIZE:
            raise CheckpointError(
                f"{self._where}: {_shown(pattern)}: got a length times repeats of "
                f"{size if size < 10**12 else 'over 10^12'}, expected at most {_MAX_SIZE}"
            )
        try:
            re.compile(pattern)  # syntax that only `regex` knows is refused
            return regex.compile(_PLAIN_BRACE.sub(_escaped, pattern), regex.VERSION0)
        except (re.error, regex.error, OverflowError, RecursionError) as error:
            raise CheckpointError(
                f"{self._where}: {_shown(pattern)} is no regular expression: {error}"
            ) from error


def transformers_pattern(entry: str) -> str:
    """Return the regular expression of an entry of transformers' `modules_to_not_convert`.

    It means a module, everything inside it, and every module whose name ends with it.
    """
    entry = entry.removeprefix("re:")
    return rf"(?:{entry})(?:(?<=\.)|(?=\.|$))|.*{re.escape(entry)}$"


def _number(digits: str) -> int:
    return int(digits[:10] or 0)


def _escaped(brace: re.Match[str]) -> str:
    return brace[1] or r"\{"


def _shown(pattern: str) -> str:
    text = repr(pattern)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}… ({len(pattern)} characters)"
