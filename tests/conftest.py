"""Fixtures shared by every test folder, and the rule about machines without nvcc."""

import gc

import pytest
import torch
from hypothesis import settings

from effort import EXAMPLES, LONG, effort, is_of_part, sampled_names
from ostinato.jit.targets import capability_of
from ostinato.jit.toolchain import find_nvcc

HAS_NVCC = find_nvcc() is not None

# A machine that others use, too, stalls at times for longer than any deadline would be worth.
settings.register_profile(
    "ostinato",
    deadline=None,
    derandomize=EXAMPLES == 0,
    max_examples=EXAMPLES or effort(40, 200),
)
settings.load_profile("ostinato")


def pytest_report_header() -> list[str]:
    return [] if HAS_NVCC else ["no nvcc: the tests marked nvcc are deselected"]


def _is_property(item: pytest.Item) -> bool:
    return item.get_closest_marker("hypothesis") is not None


def _is_sampled(item: pytest.Item) -> bool:
    """Return whether `make test` may try less of a test than `make test-long` does."""
    names = {part.partition("[")[0] for part in item.nodeid.split("::")[1:]}
    return _is_property(item) or not sampled_names(item.path).isdisjoint(names)


def _is_short(item: pytest.Item) -> bool:
    """Return False for what takes minutes, and begins first: none of two processes ends with it."""
    marker = item.get_closest_marker("timeout")
    return marker is None or marker.args[0] < 900


@pytest.hookimpl(trylast=True)  # behind hypothesis, which marks its tests here
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    def is_run(item: pytest.Item) -> bool:
        compiles = item.get_closest_marker("nvcc") is not None
        if compiles and not HAS_NVCC:
            return False
        if EXAMPLES:
            return _is_property(item)
        return not LONG or (_is_sampled(item) and is_of_part(item.nodeid))

    kept: list[pytest.Item] = []
    left: list[pytest.Item] = []
    for item in items:
        (kept if is_run(item) else left).append(item)
    config.hook.pytest_deselected(items=left)
    items[:] = sorted(kept, key=_is_short)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("hopper") is not None and capability_of(0) != (9, 0):
        pytest.skip("the GPU has no kernels of Hopper's")


def pytest_collection_finish() -> None:
    _spare_objects()


def _spare_objects() -> None:
    """Spare the garbage collector all that is imported and collected by now and stays.

    Some tests collect garbage hundreds of times: 0.2 s each while it visits those objects, too.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def spared_objects() -> None:
    """Spare the collector what the tests before this module's left, too."""
    _spare_objects()


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Run the test on the CPU always and on a GPU under `make test-gpu`."""
    return torch.device(request.param)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
