"""Name patterns of configurations, which say which modules are meant."""

from __future__ import annotations

import re

from .errors import CheckpointError


def match_regex(pattern: str, text: str, where: str) -> bool:
    """Return whether `pattern` matches the beginning of `text`.

    Raises:
        CheckpointError: when the pattern is no regular expression.
    """
    try:
        return re.match(pattern, text) is not None
    except re.error as error:
        raise CheckpointError(f"{where}: {pattern!r} is no regular expression: {error}") from error
