"""Whose turn it is in a memory pool: one call at a time, and who waits for it."""

import signal
import threading

import pytest

from ostinato.graphs import BusyError
from ostinato.graphs.guards import Turn


def test_a_turn_is_ended_once():
    turn = Turn()
    assert turn.take("runner", "run")
    turn.end()
    with pytest.raises(RuntimeError, match="the turn is not taken"):
        turn.end()
    with turn.hold("runner", "run") as hold:
        hold.end()
        assert turn.take("other", "run")
    assert turn.owner == "other"  # which the statement has left alone


def test_a_signal_is_heard_while_a_turn_is_waited_for():
    turn = Turn()
    with turn.hold("runner", "burst") as burst:
        burst.detach()

    def hear(*_):
        raise KeyError("heard")

    before = signal.signal(signal.SIGALRM, hear)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        with pytest.raises(KeyError, match="heard"), turn.hold("other", "close", 60):
            pass
    finally:
        signal.signal(signal.SIGALRM, before)
    burst.end()
    with turn.hold("other", "close", 60):
        pass


def test_a_turn_that_another_thread_ends_is_taken_then():
    turn = Turn()
    match = "close: another runner of the same pool is in the middle of run"
    with turn.hold("runner", "run") as run:
        # At once: this thread would wait for itself.
        with pytest.raises(BusyError, match=match), turn.hold("other", "close", 60):
            pass
        run.detach()
    threading.Timer(0.05, run.end).start()
    with turn.hold("other", "close", 60):
        assert (turn.owner, turn.what) == ("other", "close")
    assert turn.owner is None


def test_a_turn_is_given_back_when_the_check_or_the_block_raises():
    turn, free = Turn(), []

    def fail():
        free.append(turn.take("other", "run"))
        raise KeyError("checked")

    with pytest.raises(KeyError, match="checked"), turn.hold("runner", "run", check=fail):
        raise AssertionError("unreachable")
    with pytest.raises(OverflowError), turn.hold("runner", "run"):
        raise OverflowError
    assert free == [False]
    assert turn.take("other", "run")
