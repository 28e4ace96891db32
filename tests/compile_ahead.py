"""Compiles what the tests marked gpu launch, on a machine without a GPU: `make gpu-kernels`.

A pytest plugin. The fixtures of tests/kernels ask `compiler.build` for their kernels, some of them
with injected delays; here that is noted, and no test runs. Then these are compiled, all of the
catalogue, and what the tests of the ops launch.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NoReturn

import pytest
from ops_kernels import kernels_of_the_tests, plans_of_earlier_gpus

from ostinato.cli.build import build_plans
from ostinato.jit import compiler
from ostinato.jit.compiler import Plan, plan
from ostinato.ops.catalogue import CATALOGUE
from ostinato.ops.linear.tile_table import H200_SMS

_noted: dict[str, Plan] = {}  # by key: some are wanted by several


def _note(plans: Iterable[Plan]) -> None:
    _noted.update({item.key: item for item in plans})


def _note_instead(plans: Iterable[Plan], **_options: object) -> NoReturn:
    _note(plans)
    pytest.skip("its kernels are noted")


# Before a test imports it; `build_plans` has its own.
compiler.build = _note_instead


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call() -> None:
    pytest.skip("no test runs here")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    _note(map(plan, (*CATALOGUE, *kernels_of_the_tests(H200_SMS))))
    _note(plans_of_earlier_gpus())
    print()  # after the dots
    # A fixture that fails before it asks would have its kernels missed.
    missed = pytest.ExitCode.TESTS_FAILED if session.testsfailed else pytest.ExitCode.OK
    build_plans(list(_noted.values()))
    session.exitstatus = missed
