"""How much of a long property is tried: a sample under `make test`, all of it under `.ci/run`.

`make test` has to answer within minutes on two cores. What it samples, `make test-long` does whole:
there OSTINATO_TEST_EFFORT is `long`. Each behaviour is tested by both.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")

LONG = os.environ.get("OSTINATO_TEST_EFFORT", "") == "long"


def effort(short: T, long: T) -> T:
    """Return what this run tries: a count, or a list of cases."""
    return long if LONG else short


def sampled(items: Iterable[T], stride: int, *, first: int = 10) -> Iterator[T]:
    """Yield all items under `make test-long`, else the first few and every `stride`-th of the rest.

    Each run of the suite takes the same ones, so that what fails can be repeated.
    """
    for index, item in enumerate(items):
        if LONG or index < first or index % stride == 0:
            yield item
