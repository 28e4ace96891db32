"""Sleeping, waking and closing, also beside other threads."""

import math
import threading
import time

import pytest
import torch
from graphs_toys import SPECS, ToyStep, toy_inputs

from ostinato.graphs import (
    AsleepError,
    BusyError,
    CaptureError,
    ClosedError,
    GraphError,
    GraphRunner,
    InvalidatedError,
    Misses,
    NotCapturedError,
    StaticBuffers,
    VerificationError,
)

ONE_ROW = {"tokens": [1], "hidden": [[1.0, 2.0, 3.0]]}


def test_a_runner_sleeps_and_wakes_as_it_was(step, make_runner):
    runner = make_runner(step)
    runner.capture([1, 4])
    runner.sleep()
    runner.sleep()
    assert runner.keys == ()
    for call in (
        lambda: runner.run(1, ONE_ROW),
        lambda: runner.bucket_for(1),
        runner.require_captured,
        runner.check_memory,
    ):
        with pytest.raises(AsleepError, match=r"call wake\(\)"):
            call()
    report = runner.wake()
    assert [graph.batch_size for graph in report.graphs] == [1, 4]
    assert [graph.verdict for graph in report.graphs] == ["bit-equal"] * 2
    assert runner.run(1, ONE_ROW)["tokens"].tolist() == [3]


def test_wake_verifies(make_runner):
    random = False

    def step(batch):
        return batch.hidden + (torch.rand_like(batch.hidden) if random else 0)

    runner = make_runner(step)
    runner.capture([2])
    runner.sleep()
    random = True
    with pytest.raises(VerificationError):
        runner.wake()
    with pytest.raises(AsleepError):
        runner.run(1, ONE_ROW)
    random = False
    runner.wake()
    assert runner.run(1, ONE_ROW).tolist() == [[1.0, 2.0, 3.0]]


def test_a_runner_that_fails_to_wake_is_still_asleep(step, make_runner):
    def fragile_step(batch):
        if broken:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return step(batch)

    broken = False
    runner = make_runner(fragile_step)
    runner.capture([2])
    runner.sleep()
    broken = True
    with pytest.raises(CaptureError, match="the device is out of memory"):
        runner.wake()
    with pytest.raises(AsleepError):
        runner.run(1, ONE_ROW)
    broken = False
    runner.wake()
    assert runner.run(1, ONE_ROW)["tokens"].tolist() == [3]


def test_waking_and_sleeping_at_the_wrong_time(step, make_runner):
    runner = make_runner(step)
    with pytest.raises(NotCapturedError):
        runner.sleep()
    with pytest.raises(GraphError, match="wake: the runner is not asleep"):
        runner.wake()
    runner.capture([2])
    with pytest.raises(GraphError, match="wake: the runner is not asleep"):
        runner.wake()
    runner.invalidate("weights were reloaded")
    with pytest.raises(InvalidatedError):
        runner.sleep()
    runner.recapture()
    runner.sleep()
    runner.invalidate("weights were reloaded")  # there is nothing to refuse
    runner.capture([4])  # another capture wakes it, too
    assert runner.run(1, ONE_ROW)["tokens"].tolist() == [3]
    runner.sleep()
    runner.close()
    for call in (runner.wake, runner.sleep, lambda: runner.run(1, ONE_ROW)):
        with pytest.raises(ClosedError):
            call()


def test_sleep_with_misses_forgets_late_captures(step, make_runner):
    runner = make_runner(step)
    runner.capture([2], misses=Misses("capture"))
    runner.run(3, toy_inputs(3))
    runner.sleep()
    runner.wake()
    assert runner.run(3, toy_inputs(3) | {"tokens": [1, 2, 3]})["tokens"].tolist() == [3, 5, 7]
    assert runner.stats().lazy_captures == 1


def test_weights_may_move_in_the_warm_up(make_runner, device):
    model = torch.nn.Linear(3, 3).to(device)
    calls = []

    def packing_step(batch):
        if not calls:
            model.weight.data = model.weight.data.clone()
        calls.append(1)
        return model(batch.hidden)

    runner = make_runner(packing_step, memory={"weights": model})
    runner.capture([2])
    runner.check_memory()
    runner.run(1, ONE_ROW)


def test_memory_moved_before_verification_fails_the_capture(make_runner):
    model = torch.nn.Linear(3, 3)
    kept = []  # so that the memory is not given to the next tensor
    calls = []

    def moving_step(batch):
        calls.append(1)
        if len(calls) == 4:  # in the verification
            kept.append(model.weight.data)
            model.weight.data = model.weight.data.clone()
        return batch.hidden @ model.weight

    runner = GraphRunner(moving_step, StaticBuffers(SPECS, 8, "cpu"), memory={"weights": model})
    match = r"memory\['weights'\], weight has moved since the captures began"
    with pytest.raises(CaptureError, match=match):
        runner.capture([2])
    with pytest.raises(NotCapturedError):
        runner.run(1, ONE_ROW)
    runner.capture([2])
    runner.run(1, ONE_ROW)


class SlowStep(ToyStep):
    """Waits in a call until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.slow = False
        self.entered, self.leave = threading.Event(), threading.Event()

    def __call__(self, batch):
        if self.slow:
            self.entered.set()
            self.leave.wait(timeout=60)
        return super().__call__(batch)


@pytest.fixture(params=["first run", "known run"])
def slow_run(request):
    """A runner on the CPU, in the midst of a run of another thread."""
    step = SlowStep()
    runner = GraphRunner(step, StaticBuffers(SPECS, 8, "cpu"))
    runner.capture([2])
    if request.param == "known run":
        runner.run(1, ONE_ROW)
    results = []
    step.slow = True
    thread = threading.Thread(target=lambda: results.append(runner.run(1, ONE_ROW)["tokens"]))
    thread.start()
    assert step.entered.wait(timeout=60)
    yield runner, step, thread, results
    step.leave.set()
    thread.join(timeout=60)


def test_close_waits_for_a_run_of_another_thread(slow_run):
    runner, step, thread, results = slow_run
    closing = threading.Thread(target=runner.close)
    closing.start()
    time.sleep(0.05)
    assert closing.is_alive()
    assert runner.keys != ()
    step.leave.set()
    closing.join(timeout=60)
    thread.join(timeout=60)
    assert results[0].tolist() == [3]
    with pytest.raises(ClosedError):
        runner.run(1, ONE_ROW)


@pytest.mark.parametrize(("timeout", "error"), [(math.nan, ValueError), (None, TypeError)])
def test_a_close_for_no_time_at_all_closes_nothing(timeout, error, step, make_runner):
    runner = make_runner(step)
    runner.capture([1])
    with pytest.raises(error, match="timeout_s: got"):
        runner.close(timeout_s=timeout)
    assert runner.run(1, ONE_ROW)["tokens"].tolist() == [3]
    runner.close()


def test_a_close_that_waited_too_long_changes_nothing(slow_run):
    runner, step, thread, _ = slow_run
    with pytest.raises(BusyError, match="close: the runner is in the middle of run"):
        runner.close(timeout_s=0.01)
    step.leave.set()
    thread.join(timeout=60)
    assert runner.run(1, ONE_ROW)["tokens"].tolist() == [3]
    runner.close()


def test_runs_are_refused_while_close_waits(step, monkeypatch):
    runner = GraphRunner(step, StaticBuffers(SPECS, 8, "cpu"))
    runner.capture([2])
    seen = []

    def check_idle():  # of the device, when `close` has waited
        with pytest.raises(ClosedError) as info:
            runner.require_captured()
        seen.append(str(info.value))

    monkeypatch.setattr(runner._backend, "check_idle", check_idle)
    runner.close()
    assert seen == ["the runner is closed: make a new GraphRunner"]


def test_close_from_inside_the_step_is_refused_at_once(step):
    def closing_step(batch):
        runner.close()
        return step(batch)

    runner = GraphRunner(closing_step, StaticBuffers(SPECS, 8, "cpu"))
    started = time.perf_counter()
    with pytest.raises(BusyError, match="close: the runner is in the middle of capture"):
        runner.capture([1])
    assert time.perf_counter() - started < 10  # and does not wait for itself


def test_two_closes_wait_and_admit_no_calls(slow_run):
    runner, step, thread, _ = slow_run
    patient = threading.Thread(target=runner.close)
    patient.start()
    while not runner._lifecycle.closing:
        time.sleep(0.001)
    with pytest.raises(BusyError):
        runner.close(timeout_s=0.01)
    with pytest.raises(ClosedError):
        runner.require_captured()
    step.leave.set()
    thread.join(timeout=60)
    patient.join(timeout=60)
    with pytest.raises(ClosedError):
        runner.run(1, ONE_ROW)


@pytest.mark.parametrize("call", ["sleep", "close"])
def test_a_failed_release_leaves_a_runner_without_graphs(call, step, monkeypatch):
    def fail(graphs):
        raise RuntimeError("CUDA error")

    runner = GraphRunner(step, StaticBuffers(SPECS, 8, "cpu"))
    runner.capture([2])
    expected = AsleepError if call == "sleep" else NotCapturedError
    with monkeypatch.context() as patch:
        patch.setattr(runner._backend, "release", fail)
        with pytest.raises(RuntimeError, match="CUDA error"):
            getattr(runner, call)()
    for refused in (lambda: runner.run(1, ONE_ROW), lambda: runner.max_batch_size):
        with pytest.raises(expected):
            refused()
    if call == "sleep":
        runner.wake()
    else:
        runner.recapture()
    assert runner.run(1, ONE_ROW)["tokens"].tolist() == [3]
    runner.close()


@pytest.mark.parametrize("call", ["run", "close"])
def test_calls_inside_a_late_captured_step_are_refused(call, step):
    def calling_step(batch):
        if armed:
            runner.run(1, ONE_ROW) if call == "run" else runner.close()
        return step(batch)

    armed = False
    runner = GraphRunner(calling_step, StaticBuffers(SPECS, 8, "cpu"))
    runner.capture([4], misses=Misses("capture", [1, 4]))
    armed = True
    with pytest.raises(BusyError, match="the runner is in the middle of run"):
        runner.run(1, ONE_ROW)
    armed = False
    assert runner.run(1, ONE_ROW)["tokens"].tolist() == [3]


def test_two_living_runners_cannot_have_the_same_buffers(step, buffers):
    first = GraphRunner(step, buffers)
    with pytest.raises(ValueError, match=r"buffers: .* another GraphRunner.*close"):
        GraphRunner(step, buffers)
    first.capture([2])
    first.sleep()
    with pytest.raises(ValueError, match="buffers: "):
        GraphRunner(step, buffers)
    first.wake()
    assert first.run(1, ONE_ROW)["tokens"].tolist() == [3]
    first.close()
    with GraphRunner(step, buffers) as second:
        first.close()  # again, which gives away nothing of the second's
        with pytest.raises(ValueError, match="buffers: "):
            GraphRunner(step, buffers)
        second.capture([2])
        assert second.run(1, ONE_ROW)["tokens"].tolist() == [3]


def test_buffers_of_a_dropped_runner_are_free(step, buffers):
    GraphRunner(step, buffers).capture([2])
    with pytest.raises(TypeError, match="burst: got dict"):
        GraphRunner(step, buffers, burst={})
    with GraphRunner(step, buffers) as runner:
        runner.capture([2])
        assert runner.run(1, ONE_ROW)["tokens"].tolist() == [3]


def test_what_may_be_asked_of_a_closed_runner(step, make_runner):
    runner = make_runner(step)
    runner.capture([2])
    runner.run(1, ONE_ROW)
    runner.close()
    assert (runner.keys, runner.batch_sizes, runner.stats().buckets) == ((), (), ())
    runner.invalidate("it is closed anyway")
    for refused in (
        lambda: runner.run(1, ONE_ROW),
        lambda: runner.bucket_for(1),
        lambda: runner.max_batch_size,
        lambda: runner.burst(1, ONE_ROW, 1),
        lambda: runner.dump(2, "nowhere"),
        runner.require_captured,
        runner.check_memory,
        runner.observe,
        runner.capture,
        runner.recapture,
        runner.sleep,
        runner.wake,
    ):
        with pytest.raises(ClosedError):
            refused()
