"""Who may read and end a burst: the step, other threads, forks, and the runner that is closed."""

import gc
import itertools
import math
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

import ostinato.graphs
from forks import in_a_fork
from ostinato.graphs import (
    BufferSpec,
    BurstRules,
    BusyError,
    ClosedError,
    Feed,
    GraphRunner,
    Misses,
    StaticBuffers,
)
from ostinato.graphs.loop import burst as burst_module
from ostinato.graphs.loop.cpu import CpuLoop


class Step:
    """Adds 1; calls what it is armed with, once."""

    def __init__(self) -> None:
        self.armed = None
        self.calls = 0
        self.raised: list[Exception] = []

    def __call__(self, batch):
        self.calls += 1
        armed, self.armed = self.armed, None
        if armed is not None:
            try:
                armed()
            except BusyError as error:
                self.raised.append(error)
        return batch.x + 1


@pytest.fixture
def step():
    return Step()


@pytest.fixture
def runner(step):
    buffers = StaticBuffers({"x": BufferSpec((), torch.int64, 0)}, 2, "cpu")
    with GraphRunner(step, buffers, burst=BurstRules({"x": Feed(None)}, None)) as runner:
        runner.capture([2], verify=False)
        yield runner


@pytest.mark.parametrize("call", ["runner.close", "burst.close", "next"])
def test_the_step_of_a_burst_can_neither_read_nor_end_it(call, runner, step):
    burst = runner.burst(2, {"x": [1, 2]}, 4)
    calls = {"runner.close": runner.close, "burst.close": burst.close, "next": lambda: next(burst)}
    assert next(burst) == [2, 3]
    step.armed = calls[call]
    assert list(burst) == [[3, 4], [4, 5], [5, 6]]
    assert burst.reasons == ["limit"] * 2
    assert len(step.raised) == 1
    assert runner.run(1, {"x": [1]}).tolist() == [2]


def test_a_burst_of_an_ended_thread_is_closed(runner):
    bursts = []
    thread = threading.Thread(target=lambda: bursts.append(runner.burst(1, {"x": [1]}, 3)))
    thread.start()
    thread.join()
    runner.close(timeout_s=0)
    assert bursts[0].reasons == ["cancelled"]
    assert list(bursts[0]) == []


def test_close_reads_what_another_thread_has_left(runner, step):
    burst = runner.burst(1, {"x": [1]}, 20)
    entered, leave = threading.Event(), threading.Event()
    step.armed = lambda: (entered.set(), leave.wait(60))
    reader = threading.Thread(target=lambda: next(burst))  # and then no more
    reader.start()
    assert entered.wait(60)
    with pytest.raises(BusyError, match="close: the runner is in the middle of burst"):
        runner.close(timeout_s=0.01)
    closing = threading.Thread(target=runner.close)
    closing.start()
    time.sleep(0.02)
    leave.set()
    closing.join(timeout=30)
    assert not closing.is_alive()
    reader.join()
    assert (burst.tokens, burst.reasons) == ([[2]], ["cancelled"])
    with pytest.raises(ClosedError):
        runner.run(1, {"x": [1]})


def test_close_may_wait_for_ever(runner):
    burst = runner.burst(1, {"x": [1]}, 3)
    runner.close(timeout_s=math.inf)
    assert burst.reasons == ["cancelled"]


def test_a_burst_is_cancelled_when_no_other_can_begin(runner, monkeypatch):
    seen = []
    end = runner._bursts.end_current

    def end_current(*arguments):
        with pytest.raises(ClosedError):
            runner.burst(1, {"x": [1]}, 3)
        seen.append(1)
        return end(*arguments)

    monkeypatch.setattr(runner._bursts, "end_current", end_current)
    runner.close()
    assert seen == [1]


def test_a_burst_inside_a_late_captured_step_is_refused(runner, step):
    def calling(batch):
        runner.burst(1, {"x": [1]}, 2)
        return batch.x + 1

    runner.capture([2], misses=Misses("capture", [1, 2]), verify=False)
    runner._captured._step = calling
    with pytest.raises(BusyError, match="burst: the runner is in the middle of burst"):
        runner.burst(1, {"x": [1]}, 2)
    assert runner.run(2, {"x": [1, 2]}).tolist() == [2, 3]


def test_a_burst_does_not_belong_to_a_fork(runner):
    burst = runner.burst(1, {"x": [1]}, 3)
    assert next(burst) == [2]

    def leaves_it_alone():
        burst.close()
        burst.__del__()
        assert (burst.steps, burst._memory.cancelled) == (1, False)

    assert in_a_fork(leaves_it_alone) == "nothing"
    assert in_a_fork(burst.cancel) == "ForkedError"
    assert in_a_fork(lambda: next(burst)) == "ForkedError"
    assert list(burst) == [[3], [4]]


class Interrupt(BaseException):
    """As KeyboardInterrupt, which pytest takes for its own."""


def _raise(*_):
    raise Interrupt


def _every_call_of_reading(act, runner):
    """Read bursts, each with `act` at another call within, where Python looks for signals."""
    file = burst_module.__file__
    for target in itertools.count(1):
        burst, calls, came = runner.burst(2, {"x": [1, 5]}, 3), 0, False

        def profile(frame, event, _argument, burst=burst, target=target):
            nonlocal calls, came
            if frame.f_code.co_filename == file and event in ("call", "c_return"):
                calls += 1
                if calls == target:
                    came = True
                    sys.setprofile(None)
                    act(burst)

        sys.setprofile(profile)
        try:
            for _ in burst:
                pass
        except Interrupt:
            pass
        finally:
            sys.setprofile(None)
        yield burst, target
        if not came:
            return


def test_an_exception_at_any_call_of_reading_doubles_no_token(runner):
    for burst, target in _every_call_of_reading(_raise, runner):
        burst.close()
        steps = burst.steps
        assert burst.tokens == [list(range(2, 2 + steps)), list(range(6, 6 + steps))], target
        assert len(burst.times_ns) == steps
    assert target > 30


def test_a_signal_handler_that_closes_a_burst_does_not_wait(runner):
    refused = []

    def close(burst):
        try:
            burst.close()
        except BusyError as error:
            refused.append(str(error))

    for burst, target in _every_call_of_reading(close, runner):
        burst.close()
        steps = burst.steps
        assert burst.tokens == [list(range(2, 2 + steps)), list(range(6, 6 + steps))], target
    assert refused
    assert "expected cancel(), which is allowed there" in refused[0]


def test_a_burst_interrupted_in_launch_frees_the_runner(runner, monkeypatch):
    abandoned = []
    monkeypatch.setattr(CpuLoop, "launch", _raise)
    monkeypatch.setattr(CpuLoop, "abandon", lambda loop: abandoned.append(loop))
    with pytest.raises(Interrupt):
        runner.burst(2, {"x": [1, 5]}, 3)
    assert len(abandoned) == 1
    monkeypatch.undo()
    with runner.burst(2, {"x": [1, 5]}, 3) as burst:
        assert list(burst) == [[2, 6], [3, 7], [4, 8]]


def test_a_burst_interrupted_at_its_start_leaves_nothing(step):
    package = str(Path(ostinato.graphs.__file__).parent)
    for target in itertools.count(1):
        calls, kept = 0, None

        def profile(frame, event, _argument, target=target):
            nonlocal calls
            if frame.f_code.co_filename.startswith(package) and event in ("call", "c_return"):
                calls += 1
                if calls == target:
                    sys.setprofile(None)
                    raise Interrupt

        buffers = StaticBuffers({"x": BufferSpec((), torch.int64, 0)}, 2, "cpu")
        with GraphRunner(step, buffers, burst=BurstRules({"x": Feed(None)}, None)) as runner:
            runner.capture([2], verify=False)
            sys.setprofile(profile)
            try:
                made = runner.burst(2, {"x": [1, 5]}, 3)
            except Interrupt as error:
                kept = error  # and with it what its frames hold, as sys.last_traceback does
            else:
                sys.setprofile(None)
                made.close()
            finally:
                sys.setprofile(None)
            burst = runner.burst(2, {"x": [1, 5]}, 3)
            assert next(burst) == [2, 6], target
            was_interrupted, kept = kept is not None, None
            gc.collect()
            assert list(burst) == [[3, 7], [4, 8]], target
        if not was_interrupted:
            break
    assert target > 50
