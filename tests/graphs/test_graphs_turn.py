"""Whose turn it is in a memory pool: one call at a time, and who waits for it."""

import signal
import threading

import pytest

from ostinato.graphs import BusyError
from ostinato.graphs.guards import Turn


def test_a_turn_is_ended_once():
    turn = Turn()
    turn.begin("runner", "run")
    turn.end()
    with pytest.raises(RuntimeError, match="the turn is not taken"):
        turn.end()
    assert turn.take("runner", "run")


def test_a_signal_is_heard_while_a_turn_is_waited_for():
    turn = Turn()
    turn.begin("runner", "run")
    turn.detach()

    def hear(*_):
        raise KeyError("heard")

    before = signal.signal(signal.SIGALRM, hear)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        with pytest.raises(KeyError, match="heard"):
            turn.begin("other", "close", 60)
    finally:
        signal.signal(signal.SIGALRM, before)
    turn.end()
    turn.begin("other", "close", 60)


def test_a_turn_that_another_thread_ends_is_taken_then():
    turn = Turn()
    turn.begin("runner", "run")
    with pytest.raises(BusyError, match="close: another runner of the same pool is in the middle"):
        turn.begin("other", "close", 60)  # at once: this thread would wait for itself
    turn.detach()
    threading.Timer(0.05, turn.end).start()
    turn.begin("other", "close", 60)
    assert (turn.owner, turn.what) == ("other", "close")
    turn.end()
    assert turn.owner is None
