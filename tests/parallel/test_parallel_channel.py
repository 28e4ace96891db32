"""Messages, meetings and comparisons of ranks, which are threads here."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from torch import distributed

from ostinato.graphs.errors import RankError
from ostinato.parallel.channel import Channel
from ostinato.parallel.processes import WatchedProcess, identity


def run_ranks(call: Callable[[Channel], Any], size: int = 3, timeout_s: float = 60.0) -> list[Any]:
    """Return what a call gives on each rank, an error of ranks included."""
    store = distributed.HashStore()

    def rank(number: int) -> Any:
        try:
            return call(Channel(store, number, size, timeout_s))
        except RankError as error:
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(rank, range(size)))


def test_messages_of_any_size_come_in_order() -> None:
    messages = [b"", b"a b 1", bytes(range(256)) * 20_000, b"x" * (1 << 20), b"last"]

    def call(channel: Channel) -> list[bytes]:
        got = []
        for message in messages:
            if channel._rank == 0:
                channel.send(message)
            else:
                got.append(channel.receive())
            channel.confirm("same")  # as every call of an engine ends
        return got

    assert run_ranks(call)[1:] == [messages] * 2


def test_a_meeting_gives_the_values_of_all() -> None:
    told = run_ranks(lambda channel: [channel.meet(at, [channel._rank]) for at in ("a", "b")])
    assert told == [[[[0], [1], [2]]] * 2] * 3


def test_a_rank_that_was_told_something_else_is_named() -> None:
    told = [{"WORLD_SIZE": 2, "timeout_s": 60.0}, {"WORLD_SIZE": 3, "timeout_s": 7.0}]

    for error in run_ranks(lambda channel: channel.require_alike(told), size=2):
        assert error.failures == {1: "has WORLD_SIZE 3, expected 2 as on rank 0"}


def test_a_rank_that_is_elsewhere_is_named() -> None:
    places = {0: "here", 1: "here", 2: "there"}
    errors = run_ranks(lambda channel: channel.meet(places[channel._rank], None))
    assert all(isinstance(error, RankError) for error in errors)
    assert "rank 2 is at 'there'" in str(errors[0])


def test_a_rank_that_does_not_come_is_named_by_all() -> None:
    def call(channel: Channel) -> Any:
        return None if channel._rank == 1 else channel.meet("the start", None)

    first, _, last = run_ranks(call, timeout_s=0.5)
    assert first.failures == last.failures == {1: "did not come to 'the start' in 0.5 s"}


@pytest.mark.parametrize(
    ("digests", "odd"),
    [("aab", [2]), ("abb", [0]), ("aba", [1]), ("ab", [1]), ("abbb", [0]), ("abca", [1, 2])],
)
def test_who_computes_something_else_is_named(digests: str, odd: list[int]) -> None:
    def call(channel: Channel) -> None:
        for step in range(71):  # more than are kept
            if channel._rank == 0:
                channel.send(b"go on")
            else:
                channel.receive()
            channel.confirm("same" if step < 70 else digests[channel._rank])

    first, *others = run_ranks(call, size=len(digests))
    assert isinstance(first, RankError)
    assert sorted(first.failures) == odd
    assert others == [None] * (len(digests) - 1)


def test_the_end_of_a_process_is_noticed() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    watched = WatchedProcess({**identity(), "pid": child.pid})
    assert watched.is_near
    assert not watched.ended
    child.kill()
    for _ in range(6000):
        if watched.ended:
            break
        time.sleep(0.01)
    assert watched.ended  # though nobody has asked for its exit code
    watched.close()
    assert child.wait() == -9
    assert WatchedProcess({**identity(), "pid": child.pid}).ended


def test_a_process_of_another_host_never_ends() -> None:
    watched = WatchedProcess({"host": "elsewhere", "pid": 1})
    assert not watched.is_near
    assert not watched.ended
