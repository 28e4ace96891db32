"""Who holds the run lock in a memory pool: one call at a time, and who waits for it."""

import signal
import threading

import pytest

from ostinato.graphs import BusyError
from ostinato.graphs.guards import RunLock


def test_a_turn_is_ended_once():
    run_lock = RunLock()
    assert run_lock.take("runner", "run")
    run_lock.end()
    with pytest.raises(RuntimeError, match="the run lock is not taken"):
        run_lock.end()
    with run_lock.hold("runner", "run") as hold:
        hold.end()
        assert run_lock.take("other", "run")
    assert run_lock.owner == "other"  # which the statement has left alone


def test_a_signal_is_heard_while_a_turn_is_waited_for():
    run_lock = RunLock()
    with run_lock.hold("runner", "burst") as burst:
        burst.detach()

    def hear(*_):
        raise KeyError("heard")

    before = signal.signal(signal.SIGALRM, hear)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        with pytest.raises(KeyError, match="heard"), run_lock.hold("other", "close", 60):
            pass
    finally:
        signal.signal(signal.SIGALRM, before)
    burst.end()
    with run_lock.hold("other", "close", 60):
        pass


def test_a_turn_that_another_thread_ends_is_taken_then():
    run_lock = RunLock()
    match = "close: another runner of the same pool is in the middle of run"
    with run_lock.hold("runner", "run") as run:
        # At once: this thread would wait for itself.
        with pytest.raises(BusyError, match=match), run_lock.hold("other", "close", 60):
            pass
        run.detach()
    threading.Timer(0.05, run.end).start()
    with run_lock.hold("other", "close", 60):
        assert (run_lock.owner, run_lock.what) == ("other", "close")
    assert run_lock.owner is None


def test_a_turn_is_given_back_when_the_check_or_the_block_raises():
    run_lock, free = RunLock(), []

    def fail():
        free.append(run_lock.take("other", "run"))
        raise KeyError("checked")

    with pytest.raises(KeyError, match="checked"), run_lock.hold("runner", "run", check=fail):
        raise AssertionError("unreachable")
    with pytest.raises(OverflowError), run_lock.hold("runner", "run"):
        raise OverflowError
    assert free == [False]
    assert run_lock.take("other", "run")
