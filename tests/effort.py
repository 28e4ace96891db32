"""How much of a long property is tried: `make test` takes a sample, `make test-long` all of it.

`make test` has to answer within minutes on two cores, so it samples: hypothesis tries fewer
examples, and what uses the functions of this module fewer cases. `make test-long`, where
OSTINATO_TEST_EFFORT is `long`, repeats these tests alone, with all of their cases. CI tries a
quarter of these with each commit (`make test-long PART=2/4`, OSTINATO_TEST_PART).

Both try the same examples each time: what passes here passes elsewhere. `make test-search`, where
OSTINATO_TEST_EXAMPLES is a number, runs the properties alone, with as many new random examples.
"""

from __future__ import annotations

import ast
import os
import zlib
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import pytest

T = TypeVar("T")

LONG = os.environ.get("OSTINATO_TEST_EFFORT", "") == "long"
EXAMPLES = int(os.environ.get("OSTINATO_TEST_EXAMPLES", "0"))
PART, PARTS = (int(n) for n in (os.environ.get("OSTINATO_TEST_PART") or "1/1").split("/"))
# For a test that takes long, and whose like is tried in any case.
long_only = pytest.mark.skipif(not LONG, reason="`make test-long` has it")


def effort(short: T, long: T) -> T:
    """Return what this run tries: a count, or a list of cases."""
    return long if LONG else short


def sampled(cases: list[T], step: int) -> list[T]:
    """Return each `step`-th of these cases, or all of them."""
    return effort(cases[::step], cases)


def on_devices(
    short: Iterable[tuple[Any, ...]],
    long: Iterable[tuple[Any, ...]],
    gpu: Iterable[tuple[Any, ...]] | None = None,
) -> list[Any]:
    """Return cases behind a `device`, for `parametrize(..., indirect=["device"])`.

    The CPU gets what this run tries. A GPU gets all of them at any effort, or, where a case takes
    it long, those of `gpu`.
    """
    every = list(long)
    return [
        *(pytest.param("cpu", *case) for case in effort(list(short), every)),
        *(
            pytest.param("cuda", *case, marks=pytest.mark.gpu)
            for case in effort(every if gpu is None else list(gpu), every)
        ),
    ]


def is_of_part(name: str) -> bool:
    """Return whether the part of the tests that this run tries has a test of this name."""
    return zlib.crc32(name.encode()) % PARTS == PART - 1


@cache
def sampled_names(path: Path) -> frozenset[str]:
    """Return what of a test module depends on the effort: functions and fixtures among others.

    A name does where its definition, decorators included, uses one that does.
    """
    statements = ast.parse(path.read_text(encoding="utf-8")).body
    imports = [statement for statement in statements if isinstance(statement, ast.ImportFrom)]
    found = {name.name for one in imports if one.module == "effort" for name in one.names}
    definitions = [(_defined(statement), _used(statement)) for statement in statements]
    known = 0
    while known != len(found):
        known = len(found)
        for defined, used in definitions:
            if used & found:
                found |= defined
    return frozenset(found)


def _defined(statement: ast.stmt) -> set[str]:
    """Return the names that a statement of a module gives a value."""
    if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
        return {statement.name}
    stored = (n for n in ast.walk(statement) if isinstance(n, ast.Name))
    return {name.id for name in stored if isinstance(name.ctx, ast.Store)}


def _used(statement: ast.stmt) -> set[str]:
    """Return the names that a statement reads, and those of fixtures that it asks for."""
    nodes = list(ast.walk(statement))
    return {node.id for node in nodes if isinstance(node, ast.Name)} | {
        node.arg for node in nodes if isinstance(node, ast.arg)
    }
