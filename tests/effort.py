"""How much of a long property is tried: `make test` takes a sample, `make test-long` all of it.

`make test` has to answer within minutes on two cores, so it samples: hypothesis tries fewer
examples, and the modules that import something of this one fewer cases. `make test-long`, where
OSTINATO_TEST_EFFORT is `long`, repeats these tests alone, with all of their cases.

Both try the same examples each time: what passes here passes elsewhere. `make test-search`, where
OSTINATO_TEST_EXAMPLES is a number, runs the properties alone, with as many new random examples.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any, TypeVar

import pytest

T = TypeVar("T")

LONG = os.environ.get("OSTINATO_TEST_EFFORT", "") == "long"
EXAMPLES = int(os.environ.get("OSTINATO_TEST_EXAMPLES", "0"))


def effort(short: T, long: T) -> T:
    """Return what this run tries: a count, or a list of cases."""
    return long if LONG else short


def sampled(cases: list[T], step: int) -> list[T]:
    """Return each `step`-th of these cases, or all of them."""
    return effort(cases[::step], cases)


def on_devices(short: Iterable[tuple[Any, ...]], long: Iterable[tuple[Any, ...]]) -> list[Any]:
    """Return cases behind a `device`, for `parametrize(..., indirect=["device"])`.

    The CPU gets what this run tries, and a GPU all of them at any effort: it is fast.
    """
    every = list(long)
    return [
        *(pytest.param("cpu", *case) for case in effort(list(short), every)),
        *(pytest.param("cuda", *case, marks=pytest.mark.gpu) for case in every),
    ]
