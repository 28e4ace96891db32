"""Compiles what the tests marked gpu launch, on a machine without a GPU: `make gpu-kernels`.

A pytest plugin. The fixtures of tests/kernels ask `compiler.build` for their kernels, some of them
with injected delays; here that is noted, and no test runs. Then these are compiled, all of the
catalogue, and what the tests of the ops launch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from ostinato.kernels import compiler
from ostinato.kernels.cache import Entry, cache_folder
from ostinato.kernels.catalogue import CATALOGUE
from ostinato.kernels.compiler import Plan, find, plan
from ostinato.kernels.errors import KernelError
from ostinato.ops.gemm_table import H200_SMS

_noted: dict[tuple[str, str], Plan] = {}


def _note(plans: Sequence[Plan], **_options: object) -> list[Entry]:
    _noted.update({(p.variant.name, str(p.mode)): p for p in plans})
    pytest.skip("noted")


# Before a test imports it.
_build: Callable[..., list[Entry]] = compiler.build
compiler.build = _note


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call() -> None:
    pytest.skip("not run")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    from ops_kernels import kernels_of_the_tests

    for variant in (*CATALOGUE, *kernels_of_the_tests(H200_SMS)):
        item = plan(variant)
        _noted[variant.name, str(item.mode)] = item
    missing = [item for item in _noted.values() if find(item) is None]
    count = f"{len(_noted)} kernels, {len(missing)} of them to be compiled"
    print(f"\n{count}, in {cache_folder()}", flush=True)
    try:
        _build(missing, report=lambda entry: print(entry.variant, entry.mode, flush=True))
    except KernelError as error:
        print(error)
        session.exitstatus = pytest.ExitCode.INTERNAL_ERROR
        return
    # A fixture that fails before it asks would have its kernels missed.
    failed = session.testsfailed > 0
    session.exitstatus = pytest.ExitCode.TESTS_FAILED if failed else pytest.ExitCode.OK
