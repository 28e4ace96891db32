"""The rule of formats that store every linear module alike, but for those that are listed."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from .format import StoredSchemeOf
from .patterns import PatternMatcher
from .storage.base import StoredScheme
from .storage.dense import DENSE

# The output projection is in 16 bits whether or not the configuration lists it.
_OUTPUT = "lm_head"


def all_but(patterns: Sequence[str], scheme: StoredScheme, where: str) -> StoredSchemeOf:
    """Return how modules are stored: by `scheme`, but for the output and what a pattern matches.

    Args:
        patterns: regular expressions, which match from the beginning of a name.
        scheme: of all other linear modules.
        where: what the patterns come from, for messages.

    Raises:
        CheckpointError: naming a pattern that is malformed.
    """
    matcher = PatternMatcher(where)
    for pattern in patterns:
        matcher.matches(pattern, "")  # a malformed one is refused now, not in mid-load

    @cache
    def scheme_of(*names: str) -> StoredScheme:
        ignored = any(matcher.matches(pattern, name) for pattern in patterns for name in names)
        return DENSE if ignored or _OUTPUT in names else scheme

    return scheme_of
