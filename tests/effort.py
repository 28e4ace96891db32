"""How much of a long property is tried: `make test` takes a sample, `make test-long` all of it.

`make test` has to answer within minutes on two cores, so it samples: hypothesis tries fewer
examples, and the modules that use `effort` fewer cases. `make test-long`, where
OSTINATO_TEST_EFFORT is `long`, repeats these tests alone, with all of their cases.

Both try the same examples each time: what passes here passes elsewhere. `make test-search`, where
OSTINATO_TEST_EXAMPLES is a number, runs the properties alone, with as many new random examples.
"""

from __future__ import annotations

import os
from typing import TypeVar

T = TypeVar("T")

LONG = os.environ.get("OSTINATO_TEST_EFFORT", "") == "long"
EXAMPLES = int(os.environ.get("OSTINATO_TEST_EXAMPLES", "0"))


def effort(short: T, long: T) -> T:
    """Return what this run tries: a count, or a list of cases."""
    return long if LONG else short
