"""An exception of a signal handler, at any moment, loses no lock of a runner."""

import gc
import itertools
import random
import signal
import sys
import time

import pytest
import torch
from graphs_interrupts import Interrupt, is_interrupted_at
from graphs_toys import SPECS, ToyStep

from effort import effort
from ostinato.graphs import GraphRunner, Misses, StaticBuffers
from ostinato.graphs.guards import only_capture

ONE_ROW = {"tokens": [1], "hidden": [[1.0, 2.0, 3.0]]}


@pytest.fixture(autouse=True)
def _untraced():
    """Measure no coverage: what does so takes a lock in each call, which an interrupt may tear."""
    before = sys.gettrace()
    sys.settrace(None)
    yield
    sys.settrace(before)


def make_runner():
    runner = GraphRunner(ToyStep(), StaticBuffers(SPECS, 2, "cpu"))
    runner.capture([2], progress=False, verify=False)
    return runner


CALLS = {
    "run": lambda runner: runner.run(1, ONE_ROW),
    "check_memory": lambda runner: runner.check_memory(),
    "invalidate": lambda runner: runner.invalidate("new weights"),
    "capture": lambda runner: runner.capture([1], progress=False, verify=False),
    "sleep": lambda runner: runner.sleep(),
    "close": lambda runner: runner.close(),
}


@pytest.mark.parametrize("name", CALLS)
def test_an_exception_at_any_instruction_leaves_it_usable(name):
    event, step = 1, 41 if name == "capture" else effort(7, 1) if name == "run" else 1
    while True:
        runner = make_runner()
        was_interrupted = is_interrupted_at(event, lambda runner=runner: CALLS[name](runner))
        with only_capture():
            pass
        if name != "close":
            runner.capture([2], progress=False, verify=False)
            assert runner.run(1, ONE_ROW)["tokens"].tolist() == [3]
        runner.close()
        if not was_interrupted:
            break
        event += step
    assert event > 20


def test_late_captures_that_are_interrupted_leave_runs_that_work():
    for event in itertools.count(1, 97):
        runner = GraphRunner(ToyStep(), StaticBuffers(SPECS, 2, "cpu"))
        runner.capture([], misses=Misses("capture", max_graphs=1), progress=False)
        runner.run(1, ONE_ROW)
        two_rows = {name: 2 * rows for name, rows in ONE_ROW.items()}
        was_interrupted = is_interrupted_at(event, lambda r=runner, x=two_rows: r.run(2, x))
        for n, inputs in ((1, ONE_ROW), (2, two_rows), (1, ONE_ROW)):
            assert runner.run(n, inputs)["tokens"].tolist() == [3] * n
        runner.close()
        if not was_interrupted:
            break
    assert event > 1000


# What is raised in a destructor is lost.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("name", ["run", "capture"])
def test_signals_at_any_moment_leave_a_runner_that_can_be_used(name):
    def interrupt(*_):
        raise Interrupt

    heard, runner, call = 0, make_runner(), CALLS[name]
    runner.observe(replay_times=True)  # so that runs are not repeated without Python
    before = signal.signal(signal.SIGALRM, interrupt)
    deadline = time.monotonic() + effort(0.8, 2)
    try:
        while heard <= 20 or time.monotonic() < deadline:  # a busy machine takes longer
            soon = time.monotonic() + 0.01
            try:
                signal.setitimer(signal.ITIMER_REAL, random.uniform(2e-5, 4e-4))
                while time.monotonic() < soon:
                    call(runner)
                signal.setitimer(signal.ITIMER_REAL, 0)  # on a busy machine it may not have run out
            except Interrupt:
                heard += 1
            with only_capture():
                pass
    finally:
        signal.signal(signal.SIGALRM, before)
        torch.set_grad_enabled(True)  # torch's own statements may be torn
    assert gc.isenabled()
    runner.capture([2], progress=False)
    assert runner.run(1, ONE_ROW)["tokens"].tolist() == [3]
    runner.close()
