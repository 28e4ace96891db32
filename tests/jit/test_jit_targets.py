"""The table of GPUs that kernels are compiled for, and devices that stand in for others."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ostinato.jit import targets
from ostinato.jit.targets import (
    TARGETS,
    capability_of,
    local_target,
    target_for,
    target_named,
    target_of,
)


@pytest.fixture(autouse=True)
def _asked_anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(targets.VARIABLE, raising=False)
    capability_of.cache_clear()
    target_for.cache_clear()
    yield
    capability_of.cache_clear()
    target_for.cache_clear()


def _be(
    monkeypatch: pytest.MonkeyPatch, own: tuple[int, int], stand_in_for: str | None = None
) -> None:
    """Make every device one of capability `own`."""
    monkeypatch.setattr(targets, "_driver_capability", lambda device: own)
    if stand_in_for is not None:
        monkeypatch.setenv(targets.VARIABLE, stand_in_for)


def test_names_and_capabilities_are_unique_and_rise() -> None:
    assert len({target.name for target in TARGETS}) == len(TARGETS)
    capabilities = [target.capability for target in TARGETS]
    assert capabilities == sorted(set(capabilities))


@pytest.mark.parametrize(
    ("capability", "name"),
    [
        *[((8, 0), "80"), ((8, 6), "86"), ((8, 7), "87"), ((8, 9), "89"), ((9, 0), "90a")],
        *[((10, 0), "100"), ((10, 3), "103"), ((12, 0), "120")],
        *[((12, 1), "120"), ((10, 7), "103"), ((8, 2), "80")],
        *[((7, 5), None), ((11, 0), None), ((13, 0), None)],
    ],
)
def test_the_nearest_target_of_the_same_major_runs(
    capability: tuple[int, int], name: str | None
) -> None:
    found = target_of(capability)
    assert (None if found is None else found.name) == name


def test_names_of_targets() -> None:
    assert target_named("90a") is target_named("sm_90a")
    assert target_named("90a").gencode == "arch=compute_90a,code=sm_90a"
    assert target_named("compute_80").gencode == "arch=compute_80,code=compute_80"
    for target in (*TARGETS, target_named("compute_80")):
        assert target_named(str(target)) == target
    with pytest.raises(ValueError, match="arch: got '90', expected one of 80, 86, "):
        target_named("90")


@pytest.mark.parametrize("own", [(8, 6), (9, 0), (12, 1), (7, 0)])
def test_a_device_is_itself_by_default(
    monkeypatch: pytest.MonkeyPatch, own: tuple[int, int]
) -> None:
    _be(monkeypatch, own)
    assert capability_of(0) == own
    assert target_for(0) == target_of(own)


@pytest.mark.parametrize(
    ("own", "capability", "gencode"),
    [
        ((9, 0), "8.0", "arch=compute_80,code=compute_80"),
        ((9, 0), "8.9", "arch=compute_89,code=compute_89"),
        ((9, 0), "9.0", "arch=compute_90a,code=sm_90a"),
        ((9, 0), "12.0", "arch=compute_90a,code=sm_90a"),
        ((12, 0), "8.6", "arch=compute_86,code=compute_86"),
        ((8, 6), "8.0", "arch=compute_80,code=compute_80"),
        ((12, 1), "12.0", "arch=compute_120,code=compute_120"),
    ],
)
def test_a_device_stands_in_for_another(
    monkeypatch: pytest.MonkeyPatch, own: tuple[int, int], capability: str, gencode: str
) -> None:
    _be(monkeypatch, own, capability)
    major, minor = capability.split(".")
    assert capability_of(0) == (int(major), int(minor))
    target = target_for(0)
    assert target is not None
    assert target.gencode == gencode


@pytest.mark.parametrize(
    ("own", "capability", "words"),
    [
        ((9, 0), "8", "got '8', expected a capability such as 8.0"),
        ((9, 0), "sm_80", "got 'sm_80', expected a capability such as 8.0"),
        ((9, 0), "7.5", "got 7.5, expected one of a known GPU, from 8.0 on"),
        ((8, 0), "8.9", "a device of capability 8.0 can stand in for: it lacks fp8"),
        ((8, 9), "12.0", "a device of capability 8.9 can stand in for: it lacks clusters"),
        ((12, 0), "9.0", "a device of capability 12.0 can stand in for: it lacks hopper"),
        ((7, 5), "8.0", "a device of capability 7.5 can stand in for: it lacks all that"),
    ],
)
def test_what_a_device_can_not_stand_in_for_is_refused(
    monkeypatch: pytest.MonkeyPatch, own: tuple[int, int], capability: str, words: str
) -> None:
    _be(monkeypatch, own, capability)
    for ask in (capability_of, target_for):
        with pytest.raises(ValueError, match=f"^{targets.VARIABLE}: .*{words}"):
            ask(0)


def test_without_a_gpu_kernels_are_compiled_for_the_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_driver(device: int) -> tuple[int, int]:
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(targets, "_driver_capability", no_driver)
    assert str(local_target()) == "sm_90a"
    _be(monkeypatch, (8, 6))
    assert str(local_target()) == "sm_86"
