"""Who shares a workspace, and for how long it lives: with captures that are only said to be."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given as for_all
from hypothesis import strategies as st

from ostinato.graphs.inspect.audit import KEPT_BY_LIBRARY
from ostinato.ops.common import workspace
from ostinato.ops.common.workspace import Workspaces, drop_unused_workspaces


class Hold:
    """Stands for what a captured graph holds; its graph is the capture's id."""

    def __init__(self, stream: int) -> None:
        self._graph = driver.captures[stream]
        driver.holds += 1

    @property
    def is_alive(self) -> bool:
        return self._graph not in driver.gone


class Driver:
    """Which stream is in which capture, in which pool that is, and which graphs are gone."""

    def __init__(self) -> None:
        self.captures: dict[int, int] = {}
        self.pools: dict[int, tuple[int, int] | None] = {}
        self.gone: set[int] = set()
        self.holds = 0
        self.current = 0
        self.waits = 0

    def begin(self, stream: int, capture: int, pool: tuple[int, int] | None) -> None:
        self.captures[stream] = capture
        self.pools[capture] = pool
        self.current = stream

    def end(self, stream: int) -> None:
        del self.captures[stream]

    def synchronize(self) -> None:
        self.waits += 1


driver = Driver()


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        replace_driver(patch)
        yield


def replace_driver(patch: pytest.MonkeyPatch) -> None:
    global driver
    driver = Driver()
    patch.setattr(workspace._C, "capture_of", lambda stream: driver.captures.get(stream, 0))
    patch.setattr(workspace._C, "GraphHold", Hold)
    patch.setattr(workspace, "_zeros", lambda device, size: torch.zeros(size, dtype=torch.uint8))
    patch.setattr(
        workspace,
        "_pool_of_capture",
        lambda device: driver.pools[driver.captures[driver.current]],
    )
    patch.setattr(torch.cuda, "current_stream", lambda device: driver)


def test_those_of_graphs_that_are_gone_are_given_back_of_all_kinds() -> None:
    kinds = [Workspaces(), Workspaces()]
    driver.begin(7, 1, (0, 5))
    kept = [weakref.ref(spaces.get(0, 7, 100)) for spaces in kinds]
    driver.end(7)
    drop_unused_workspaces()
    gc.collect()
    assert all(memory() is not None for memory in kept)
    driver.gone.add(1)
    drop_unused_workspaces()
    gc.collect()
    assert all(memory() is None for memory in kept)


def test_launches_of_a_stream_share_one() -> None:
    spaces = Workspaces()
    first = spaces.get(0, 7, 100)
    assert spaces.get(0, 7, 60) is first
    assert spaces.get(0, 8, 100) is not first
    assert spaces.get(1, 7, 100) is not first


@pytest.mark.parametrize(("first", "then"), [(373_000, 4_600_000), (18_110_000, 18_880_000)])
def test_a_call_makes_room_for_those_of_other_batches(first: int, then: int) -> None:
    """They may need more, and be captured next: so docs/notebooks/decode.md, "Which cluster"."""
    spaces = Workspaces(least_bytes=10 << 20, margin=1.2)
    made = spaces.get(0, 7, first)
    assert spaces.get(0, 7, then) is made


def test_one_that_is_outgrown_is_waited_for() -> None:
    spaces = Workspaces()
    small = spaces.get(0, 7, 100)
    assert driver.waits == 0
    large = spaces.get(0, 7, 101)
    assert driver.waits == 1
    assert large.numel() >= 101 > small.numel()
    assert spaces.get(0, 7, 100) is large


def test_a_capture_has_one_of_its_own() -> None:
    spaces = Workspaces()
    eager = spaces.get(0, 7, 100)
    driver.begin(7, 1, None)
    captured = spaces.get(0, 7, 100)
    assert captured is not eager
    assert spaces.get(0, 7, 50) is captured
    assert driver.holds == 1
    driver.end(7)
    assert spaces.get(0, 7, 100) is eager
    driver.begin(7, 2, None)
    assert spaces.get(0, 7, 100) is not captured


def test_audits_know_what_captures_share() -> None:
    spaces = Workspaces()
    eager = spaces.get(0, 7, 100)
    driver.begin(7, 1, None)
    captured = spaces.get(0, 7, 100)
    assert getattr(captured, KEPT_BY_LIBRARY)
    assert not hasattr(eager, KEPT_BY_LIBRARY)


def test_graphs_of_one_pool_share_one() -> None:
    spaces = Workspaces()
    found = []
    for capture, pool in ((1, (0, 4)), (2, (0, 4)), (3, (0, 5)), (4, (0, 4))):
        driver.begin(7, capture, pool)
        found.append(spaces.get(0, 7, 100))
        driver.end(7)
    assert found[0] is found[1] is found[3]
    assert found[2] is not found[0]
    assert driver.holds == 4


def test_streams_of_one_capture_share_none() -> None:
    spaces = Workspaces()
    driver.begin(7, 1, (0, 4))
    main = spaces.get(0, 7, 100)
    driver.begin(8, 1, (0, 4))
    assert spaces.get(0, 8, 100) is not main


def test_a_larger_one_joins_those_of_its_graph() -> None:
    spaces = Workspaces()
    driver.begin(7, 1, (0, 4))
    small = spaces.get(0, 7, 100)
    held = weakref.ref(small)
    large = spaces.get(0, 7, 200)
    del small
    gc.collect()
    assert held() is not None, "the graph has its address"
    assert spaces.get(0, 7, 100) is large


def test_what_no_graph_holds_is_given_back() -> None:
    spaces = Workspaces()
    for capture in (1, 2):
        driver.begin(7, capture, (0, 4))
        held = weakref.ref(spaces.get(0, 7, 100))
        driver.end(7)
    driver.gone.add(1)
    spaces.get(0, 9, 1)
    assert held() is not None
    driver.gone.add(2)
    spaces.get(0, 9, 2)
    assert held() is None


@for_all(
    st.lists(
        st.tuples(
            st.sampled_from(("launch", "launch", "launch", "end", "drop")),
            st.integers(0, 2),  # the stream
            st.integers(0, 2),  # the pool; 0 is none
            st.integers(1, 300),
        ),
        max_size=40,
    )
)
def test_graphs_that_may_run_at_once_never_share(
    events: list[tuple[str, int, int, int]],
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        replace_driver(patch)
        spaces = Workspaces()
        graphs: dict[int, tuple[object, list[torch.Tensor]]] = {}  # by capture
        eager: dict[int, torch.Tensor] = {}
        for number, (what, stream, pool, size) in enumerate(events, 1):
            handle = 10 + stream
            capture = driver.captures.get(handle, 0)
            if what == "end" and capture:
                driver.end(handle)
            elif what == "end":
                driver.begin(handle, number, (0, pool) if pool else None)
                graphs[number] = ((handle, pool or f"graph {number}"), [])
            elif what == "drop":
                ended = sorted(graphs.keys() - driver.captures.values())
                for gone in ended[:1]:
                    driver.gone.add(gone)
                    del graphs[gone]
            else:
                driver.current = handle
                found = spaces.get(0, handle, size)
                assert found.numel() >= size
                if capture:
                    graphs[capture][1].append(found)
                else:
                    eager[handle] = found
            users: dict[int, set[object]] = {}
            for owner, used in graphs.values():
                for memory in used:
                    users.setdefault(memory.data_ptr(), set()).add(owner)
            for handle, memory in eager.items():
                users.setdefault(memory.data_ptr(), set()).add(("eager", handle))
            assert all(len(owners) == 1 for owners in users.values())
