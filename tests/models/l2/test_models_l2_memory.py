"""Memory by L2 partitions, over a driver that is made up: what is mapped, and what is kept."""

from __future__ import annotations

import gc
import itertools
import random
import signal
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ostinato.models.l2 import partitioned_memory
from ostinato.models.l2.probe import PAGE_BYTES, L2Map, parity

pytestmark = pytest.mark.usefixtures("spared_objects")  # the collector is asked hundreds of times

_L2 = L2Map(0xAB000, sms=tuple(i % 2 for i in range(132)), between=(400.0,) * 132)
_PAIR = 2 * PAGE_BYTES
_OUT_OF_MEMORY, _OTHER = 2, 999
_TORCHS = 0x7FD6_D280_0000  # where torch's memory is


class Driver:
    """Pages of one partition or the other, as CUDA's driver hands them out and maps them.

    Args:
        alike: how many of all pairs have both pages in one partition.
        room: bytes that there are.
    """

    CUmemAllocationProp = CUmemLocation = CUmemAccessDesc = SimpleNamespace
    CUmemAllocationType = SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED=1)
    CUmemLocationType = SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE=1)
    CUmemAccess_flags = SimpleNamespace(CU_MEM_ACCESS_FLAGS_PROT_READWRITE=3)

    def __init__(self, alike: float = 0.04, room: int = 1 << 40) -> None:
        self.alike, self.room = alike, room
        self.random = random.Random(0)
        self.pages: dict[int, list[int]] = {}  # by handle, the partitions of its pages
        self.reserved: dict[int, int] = {}
        self.mapped: dict[int, int] = {}  # the handle at each address
        self.numbers = itertools.count(1)
        self.calls = self.created = 0
        self.fails: Callable[[int], Any] = lambda _call: 0  # the status of a call, or it raises

    def _status(self) -> int:
        self.calls += 1
        return int(self.fails(self.calls))

    @property
    def used(self) -> int:
        return sum(map(len, self.pages.values())) * PAGE_BYTES

    def cuMemCreate(self, size: int, _properties: Any, _flags: int) -> tuple[int, int]:
        status = self._status() or (_OUT_OF_MEMORY if self.used + size > self.room else 0)
        if status:
            return status, 0
        first = self.random.randrange(2)
        second = first if self.random.random() < self.alike else 1 - first
        handle = next(self.numbers)
        self.pages[handle] = [first, second][: size // PAGE_BYTES]
        self.created += size
        return 0, handle

    def cuMemRelease(self, handle: int) -> tuple[int]:
        assert handle not in self.mapped.values()
        del self.pages[handle]  # not twice
        return (0,)

    def cuMemAddressReserve(self, size: int, aligned: int, hint: int, _: int) -> tuple[int, int]:
        status = self._status()
        assert hint % aligned == 0
        free = not any(at < hint + size and hint < at + of for at, of in self.reserved.items())
        address = hint if hint and free else next(self.numbers) * (1 << 40) // aligned * aligned
        if not status:
            self.reserved[address] = size
        return status, address

    def cuMemAddressFree(self, address: int, size: int) -> tuple[int]:
        assert self.reserved.pop(address) == size
        assert not any(address <= at < address + size for at in self.mapped)
        return (0,)

    def cuMemMap(self, address: int, _size: int, _offset: int, handle: int, _: int) -> tuple[int]:
        status = self._status()
        if not status:
            assert handle in self.pages
            self.mapped[address] = handle
        return (status,)

    def cuMemSetAccess(self, *_: Any) -> tuple[int]:
        return (self._status(),)

    def cuMemUnmap(self, address: int, size: int) -> tuple[int]:
        inside = [at for at in self.mapped if address <= at < address + size]
        assert sum(len(self.pages[self.mapped[at]]) for at in inside) * PAGE_BYTES == size
        for at in inside:
            del self.mapped[at]
        return (0,)

    def probe(
        self, _device: int, base: int, offsets: np.ndarray, *, by_all: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        assert not by_all
        self._status()
        starts = np.array(sorted(self.mapped))
        found = []
        for at in base + offsets:
            start = int(starts[np.searchsorted(starts, at, side="right") - 1])
            page, rest = divmod(int(at) - start, PAGE_BYTES)
            found.append(self.pages[self.mapped[start]][page] ^ (rest & _L2.mask).bit_count() & 1)
        sms = np.arange(len(offsets)) % 132
        return np.where(np.array(found) == sms % 2, 300, 500), sms


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Callable[[Driver], Driver]:
    def take(driver: Driver) -> Driver:
        monkeypatch.setattr(partitioned_memory, "probe", driver.probe)
        monkeypatch.setattr(torch.cuda, "synchronize", driver._status)
        return driver

    stream = SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setattr(partitioned_memory, "on_device", lambda _device: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch, "as_tensor", lambda owner, device: owner)
    monkeypatch.setattr(torch, "empty", lambda *_, **__: SimpleNamespace(data_ptr=lambda: _TORCHS))
    monkeypatch.setattr(partitioned_memory, "_unused", [])
    return take


def _take(driver: Driver, groups: int = 20) -> Any:
    """Return who owns the memory, and the bits that tell; None without memory."""
    return partitioned_memory._allocate(driver, 0, groups * 2 * _PAIR, _L2)


def _leave_two(driver: Driver) -> None:
    """Take memory twice and have it unused."""
    owners = [_take(driver), _take(driver)]
    owners.clear()
    gc.collect()


def _drop(owner: Any) -> None:
    del owner
    gc.collect()


@pytest.mark.parametrize("alike", [0.0, 0.04, 0.5, 0.96, 1.0])
def test_addresses_tell_their_half(alike: float, use: Callable[[Driver], Driver]) -> None:
    driver = use(Driver(alike))
    owner, mask = _take(driver)
    address = owner.__cuda_array_interface__["data"][0]
    size = owner.__cuda_array_interface__["shape"][0]
    assert size == 20 * 2 * _PAIR == driver.used
    offsets = np.arange(0, size, PAGE_BYTES // 8)
    found = _L2.partitions(*driver.probe(0, address, offsets, by_all=False))
    assert (found == parity(offsets & mask)).all()
    assert address % (2 * _PAIR) == 0
    assert 0 < _TORCHS - (address + size) < 1 << 40


def test_without_room_near_torchs_memory_it_is_elsewhere(
    use: Callable[[Driver], Driver],
) -> None:
    driver = use(Driver())
    reserve = driver.cuMemAddressReserve

    def anywhere(size: int, aligned: int, hint: int, flags: int) -> tuple[int, int]:
        return (_OTHER, 0) if hint else reserve(size, aligned, hint, flags)

    driver.cuMemAddressReserve = anywhere  # type: ignore[method-assign]
    assert _take(driver) is not None


@pytest.mark.parametrize("alike", [0.0, 0.04, 0.96, 1.0])
def test_little_more_is_asked_for_than_is_used(
    alike: float, use: Callable[[Driver], Driver]
) -> None:
    driver = use(Driver(alike))
    taken = _take(driver, groups=400)
    assert taken is not None
    assert driver.created < 1.3 * driver.used


@pytest.mark.parametrize("room", [0, 1, 19, 20, 21])
def test_without_room_there_is_none_and_nothing_is_kept(
    room: int, use: Callable[[Driver], Driver]
) -> None:
    driver = use(Driver(0.1, room * 2 * _PAIR + _PAIR // 2))
    taken = _take(driver)
    assert (taken is None) == (driver.used == 0)
    if room < 20:
        assert taken is None
    assert bool(driver.mapped) == bool(driver.reserved) == (taken is not None)


@pytest.mark.parametrize("alike", [0.0, 0.3])
def test_whatever_call_fails_nothing_is_kept(alike: float, use: Callable[[Driver], Driver]) -> None:
    def outcome(fails: Callable[[int], Any]) -> tuple[Driver, str]:
        driver = use(Driver(alike))
        driver.fails = fails
        try:
            taken = _take(driver, groups=3)
        except RuntimeError as error:
            return driver, str(error)
        except KeyboardInterrupt:
            return driver, "interrupted"
        if taken is None:
            return driver, "none"
        _drop(taken)
        del taken
        driver.fails = lambda _call: 0
        partitioned_memory.free_unused()
        return driver, "made"

    def interrupt(call: int, at: int) -> int:
        if call == at:
            raise KeyboardInterrupt
        return 0

    whole, made = outcome(lambda _call: 0)
    assert (made, whole.used) == ("made", 0)
    seen = set()
    for at in range(1, whole.calls + 1):
        for fails in (
            lambda call, at=at: _OTHER if call == at else 0,
            lambda call, at=at: _OUT_OF_MEMORY if call == at else 0,
            lambda call, at=at: interrupt(call, at),
        ):
            driver, said = outcome(fails)
            seen.add(said)
            assert not driver.pages, (at, said)
            assert not driver.mapped
            assert not driver.reserved
    assert {"none", "made", "interrupted"} < seen


@pytest.fixture
def ordinary_ctrl_c() -> Iterator[None]:
    """In the background shells have it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ordinary_ctrl_c")
def test_ctrl_c_waits_until_memory_is_taken_or_given_back(
    use: Callable[[Driver], Driver],
) -> None:
    def outcome(at: int) -> tuple[Driver, int]:
        driver = use(Driver(0.3))
        interrupts = 0

        def interrupt(call: int) -> int:
            nonlocal interrupts
            if call == at:
                interrupts += 1
                signal.raise_signal(signal.SIGINT)
            return 0

        driver.fails = interrupt
        for act in (lambda: _take(driver, groups=3), partitioned_memory.free_unused):
            try:
                act()
            except KeyboardInterrupt:
                interrupts -= 1
            gc.collect()
        assert interrupts == 0
        partitioned_memory.free_unused()
        return driver, driver.calls

    _, calls = outcome(0)
    for at in range(1, calls + 1):
        driver, _ = outcome(at)
        assert not driver.pages, at
        assert not driver.mapped
        assert not driver.reserved


def test_memory_that_cannot_be_given_back_is_in_nobodys_way(
    use: Callable[[Driver], Driver],
) -> None:
    driver = use(Driver())
    _leave_two(driver)
    driver.fails = lambda _call: _OTHER
    driver.cuMemUnmap = lambda *_: (_OTHER,)  # type: ignore[method-assign]
    for _ in range(2):
        with pytest.raises(RuntimeError, match="refused"):
            partitioned_memory.free_unused()
    partitioned_memory.free_unused()


def test_caches_side_by_side_are_all_near_torchs_memory(use: Callable[[Driver], Driver]) -> None:
    driver = use(Driver())
    owners = [_take(driver) for _ in range(5)]
    addresses = [owner.__cuda_array_interface__["data"][0] for owner, _ in owners]
    assert len(set(addresses)) == len(addresses)
    assert all(0 < _TORCHS - address < 1 << 40 for address in addresses)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("alike", [0.04, 0.96])
def test_a_fourth_more_memory_is_enough(
    alike: float, seed: int, use: Callable[[Driver], Driver]
) -> None:
    driver = use(Driver(alike, 125 * 2 * _PAIR))
    driver.random.seed(seed)
    assert _take(driver, groups=100) is not None


def test_what_was_interrupted_is_given_back_the_next_time(
    use: Callable[[Driver], Driver],
) -> None:
    driver = use(Driver())
    _leave_two(driver)

    def interrupt(_call: int) -> int:
        raise KeyboardInterrupt

    driver.fails = interrupt
    with pytest.raises(KeyboardInterrupt):
        partitioned_memory.free_unused()
    assert driver.pages
    driver.fails = lambda _call: 0
    partitioned_memory.free_unused()
    assert not driver.pages
    assert not driver.reserved
