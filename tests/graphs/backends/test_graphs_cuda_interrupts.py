"""An exception of a signal handler, at any moment, leaves a runner of CUDA that can be used."""

import gc
import random
import signal
import time

import pytest
import torch
from graphs_interrupts import Interrupt, is_interrupted_at
from graphs_toys import SPECS, ToyStep

from effort import effort
from ostinato.graphs import GraphRunner, NotCapturedError, StaticBuffers
from ostinato.graphs.guards import only_capture

pytestmark = pytest.mark.gpu

ONE_ROW = {"tokens": [1], "hidden": [[1.0, 2.0, 3.0]]}


def make_runner():
    runner = GraphRunner(ToyStep(), StaticBuffers(SPECS, 2, "cuda"))
    runner.capture([2], progress=False, verify=False)
    return runner


def sleep_and_wake(runner):
    runner.sleep()
    runner.wake(progress=False, verify=False)


CALLS = {
    "run": lambda runner: runner.run(1, ONE_ROW),
    "recapture": lambda runner: runner.recapture(progress=False, verify=False),
    "capture": lambda runner: runner.capture([1], progress=False, verify=False),
    "sleep": sleep_and_wake,
    "close": lambda runner: runner.close(),
}


def check(runner):
    """See that nothing is left of a torn call: no capture, no lock, no stream that is not ours."""
    torch.cuda.set_stream(torch.cuda.default_stream())  # torch's own statements may be torn
    torch.set_grad_enabled(True)
    torch.cuda.synchronize()
    assert not torch.cuda.is_current_stream_capturing()
    with only_capture():
        pass
    torch.empty(1 << 20, device="cuda")
    torch.randn(3, device="cuda")
    runner.capture([2], progress=False, verify=False)
    assert runner.run(1, ONE_ROW)["tokens"].tolist() == [3]


@pytest.mark.parametrize("name", CALLS)
def test_an_exception_at_any_instruction_leaves_it_usable(name):
    # Every capture takes a while; the long effort takes minutes beside other processes.
    event, step = 1, {"run": 3, "close": 1}.get(name, effort(149, 37))
    while True:
        runner = make_runner()
        was_interrupted = is_interrupted_at(event, lambda runner=runner: CALLS[name](runner))
        if name != "close":
            check(runner)
        runner.close()
        if not was_interrupted:
            break
        event += step
    assert event > 20


# What is raised in a destructor is lost.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("name", ["run", "recapture", "capture", "sleep"])
def test_signals_at_any_moment_leave_it_usable(name):
    def interrupt(*_):
        raise Interrupt

    heard, runner, call = 0, make_runner(), CALLS[name]
    before = signal.signal(signal.SIGALRM, interrupt)
    deadline = time.monotonic() + effort(4, 20)
    try:
        while heard <= 20 or time.monotonic() < deadline:  # a busy GPU takes longer
            try:
                signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-4, 2e-2))
                while True:
                    call(runner)
            except Interrupt:
                heard += 1
            except NotCapturedError:  # of a run after a capture that was torn
                signal.setitimer(signal.ITIMER_REAL, 0)
            signal.setitimer(signal.ITIMER_REAL, 0)
            check(runner)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert gc.isenabled()
    runner.close()


def test_closing_at_any_moment_can_be_repeated():
    def interrupt(*_):
        raise Interrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for _ in range(effort(60, 400)):
            runner = make_runner()
            try:
                signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-5, 2e-3))
                runner.close()
                time.sleep(0.003)
            except Interrupt:
                pass
            signal.setitimer(signal.ITIMER_REAL, 0)
            runner.close()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    check(make_runner())
