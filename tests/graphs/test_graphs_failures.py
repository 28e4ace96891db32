"""What a runner refuses, and that it is as good as new after a failure."""

import gc
import threading

import pytest
import torch
from graphs_toys import SPECS, toy_inputs

from ostinato.graphs import (
    BusyError,
    CaptureError,
    ClosedError,
    GraphError,
    GraphRunner,
    InvalidatedError,
    NotCapturedError,
    StaticBuffers,
    VerificationError,
)

ONE_ROW = {"tokens": [1], "hidden": [[1.0, 2.0, 3.0]]}


class Unregistered(dict):
    """A dict of which pytree does not know how one is made."""


class UnregisteredTuple(tuple):
    __slots__ = ()


@pytest.mark.parametrize(
    ("result", "match"),
    [
        (lambda batch: None, "step: returned NoneType"),
        (lambda batch: [batch.tokens], "step: returned list"),
        (lambda batch: (), "step: returned no tensor"),
        (lambda batch: {0: batch.tokens}, "step: returned dict"),
        (lambda batch: Unregistered(x=batch.tokens), "step: returned Unregistered, expected a"),
        (lambda batch: UnregisteredTuple([batch.tokens]), "step: returned UnregisteredTuple, exp"),
        (lambda batch: (batch.tokens, 3), r"step: output\[1\] is int"),
        (lambda batch: {"x": batch.tokens.sum()}, r"step: output\['x'\] has shape \(\)"),
        (lambda batch: batch.tokens[1:], r"step: output has shape \(1,\), expected a row for each"),
        (lambda batch: torch.empty(batch.size, device="meta"), "step: output is on meta"),
    ],
)
def test_bad_step_outputs(result, match, make_runner):
    runner = make_runner(result)
    with pytest.raises(CaptureError, match=f"could not warm up batch size 2: .*{match}"):
        runner.capture([2])


@pytest.mark.parametrize("batch_sizes", [[], [0], [2, 2], [2, 1], [9]])
def test_bad_batch_sizes_keep_what_was_captured(batch_sizes, step, make_runner):
    runner = make_runner(step)
    runner.capture([2])
    with pytest.raises(ValueError, match="corrected: "):
        runner.capture(batch_sizes)
    assert runner.batch_sizes == (2,)
    assert runner.run(1, ONE_ROW)["tokens"].tolist() == [3]


@pytest.mark.parametrize(
    ("n", "error"),
    [
        (0, ValueError),
        (-1, ValueError),
        (5, ValueError),
        ("1", TypeError),
        (1.0, TypeError),
        (None, TypeError),
        (True, TypeError),
    ],
)
def test_bad_n(n, error, step, make_runner):
    runner = make_runner(step)
    runner.capture([1, 4])
    with pytest.raises(error, match=f"n: got .*{n}"):
        runner.run(n, ONE_ROW)
    with pytest.raises(error, match=f"n: got .*{n}"):
        runner.bucket_for(n)
    assert runner.stats().hits == 0


def test_bad_inputs_leave_the_runner_usable(step, make_runner):
    runner = make_runner(step)
    runner.capture([1, 4])
    with pytest.raises(ValueError, match=r"inputs\['tokens'\]: got shape \(1,\), expected \(2,\)"):
        runner.run(2, ONE_ROW)
    assert runner.stats().hits == 0
    assert runner.run(1, ONE_ROW)["tokens"].tolist() == [3]


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"step": None}, TypeError, "step: got NoneType"),
        ({"buffers": SPECS}, TypeError, "buffers: got dict"),
        ({"group": "world"}, TypeError, "group: got str"),
        ({"pool": (0, 1)}, ValueError, r"pool: got \(0, 1\), expected None for buffers on cpu"),
        ({"stream": 7}, ValueError, "stream: got 7, expected None for buffers on cpu"),
    ],
)
def test_bad_arguments(arguments, error, match, step):
    with pytest.raises(error, match=match):
        GraphRunner(**{"step": step, "buffers": StaticBuffers(SPECS, 8, "cpu"), **arguments})


def test_run_before_capture(step, make_runner):
    runner = make_runner(step)
    for call in (
        lambda: runner.run(1, ONE_ROW),
        lambda: runner.bucket_for(1),
        lambda: runner.max_batch_size,
        runner.recapture,
    ):
        with pytest.raises(NotCapturedError, match=r"call capture\(\) first"):
            call()
    assert step.calls == []


def test_close_is_idempotent_and_final(step, make_runner):
    runner = make_runner(step)
    runner.close()
    runner.close()
    with make_runner(step) as runner:
        runner.capture([1])
    runner.close()
    assert runner.batch_sizes == ()
    for call in (lambda: runner.run(1, ONE_ROW), runner.capture, runner.recapture):
        with pytest.raises(ClosedError, match="make a new GraphRunner"):
            call()


def test_outputs_outlive_the_runner(step, make_runner):
    runner = make_runner(step)
    runner.capture([1])
    out = runner.run(1, ONE_ROW)
    runner.close()
    assert out["tokens"].tolist() == [3]


def test_invalidate_refuses_until_recapture(step, make_runner):
    runner = make_runner(step)
    runner.invalidate("nothing is captured yet")
    with pytest.raises(NotCapturedError):
        runner.run(1, ONE_ROW)
    runner.capture([1, 4])
    runner.invalidate("weights were reloaded")
    with pytest.raises(InvalidatedError, match=r"weights were reloaded; call recapture\(\)"):
        runner.run(1, ONE_ROW)
    report = runner.recapture()
    assert [graph.batch_size for graph in report.graphs] == [1, 4]
    assert runner.run(1, ONE_ROW)["tokens"].tolist() == [3]
    with pytest.raises(ValueError, match="why: got an empty string"):
        runner.invalidate("")


@pytest.mark.parametrize(
    ("failing_call", "match"),
    [
        (0, "could not warm up batch size 4: KeyError: 'boom'"),
        (3, "could not warm up batch size 2"),
        (4, "could not capture batch size 4"),
        (5, "could not capture batch size 2"),
        (6, "could not verify batch size 4"),
    ],
)
def test_step_that_raises_leaves_the_runner_usable(failing_call, match, step, make_runner):
    calls = []

    def failing_step(batch):
        calls.append(batch.size)
        if len(calls) == failing_call + 1:
            raise KeyError("boom")
        return step(batch)

    runner = make_runner(failing_step)
    stream_before = torch.cuda.current_stream() if torch.cuda.is_available() else None
    with pytest.raises(CaptureError, match=match) as info:
        runner.capture([2, 4])
    assert isinstance(info.value.__cause__, KeyError)
    assert gc.isenabled()
    if stream_before is not None:
        assert torch.cuda.current_stream() == stream_before
        assert not torch.cuda.is_current_stream_capturing()
    assert runner.batch_sizes == ()
    with pytest.raises(NotCapturedError):
        runner.run(1, ONE_ROW)
    with pytest.raises(NotCapturedError):
        runner.recapture()
    runner.capture([2, 4])
    assert runner.run(1, ONE_ROW)["tokens"].tolist() == [3]


def test_failed_recapture_can_be_repeated(step, make_runner):
    broken = False

    def fragile_step(batch):
        if broken:
            raise ValueError("no weights")
        return step(batch)

    runner = make_runner(fragile_step)
    runner.capture([2])
    broken = True
    with pytest.raises(CaptureError, match="no weights"):
        runner.recapture()
    with pytest.raises(NotCapturedError):
        runner.run(1, ONE_ROW)
    broken = False
    runner.recapture()
    assert runner.batch_sizes == (2,)


def test_interrupted_capture(step, make_runner):
    interrupt = True

    def interrupted_step(batch):
        if interrupt and len(step.calls) == 4:  # in the first capture
            raise KeyboardInterrupt
        return step(batch)

    runner = make_runner(interrupted_step)
    with pytest.raises(KeyboardInterrupt):
        runner.capture([1, 2])
    interrupt = False
    runner.capture([1, 2])
    assert runner.run(1, ONE_ROW)["tokens"].tolist() == [3]


def test_step_that_raises_in_a_replay_on_cpu():
    broken = False

    def fragile_step(batch):
        if broken:
            raise ValueError("out of luck")
        return batch.tokens + 0

    runner = GraphRunner(fragile_step, StaticBuffers(SPECS, 8, "cpu"))
    runner.capture([1])
    broken = True
    with pytest.raises(ValueError, match="out of luck"):
        runner.run(1, ONE_ROW)
    assert runner.stats().hits == 0
    broken = False
    assert runner.run(1, ONE_ROW).tolist() == [1]


@pytest.mark.parametrize(
    "later",
    [lambda t: t[:, None], lambda t: t.float(), lambda t: (t, t), lambda t: {"x": t}],
)
def test_step_that_changes_what_it_returns_on_cpu(later):
    captured = False

    def changing_step(batch):
        return later(batch.tokens) if captured else batch.tokens

    runner = GraphRunner(changing_step, StaticBuffers(SPECS, 8, "cpu"))
    runner.capture([2])
    captured = True
    with pytest.raises(GraphError, match="cannot change what it returns"):
        runner.run(2, toy_inputs(2))


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    ("what", "cause"),
    [
        ("not captured", NotCapturedError),
        ("closed", ClosedError),
        ("busy", BusyError),
        ("random", VerificationError),
    ],
)
def test_refusals_of_another_runner_are_failures_of_the_step(what, cause, size, step, make_runner):
    def inner_step(batch):
        if what == "busy":
            inner.run(1, ONE_ROW)
        return torch.rand_like(batch.hidden) if what == "random" else step(batch)

    inner = make_runner(inner_step)
    if what == "closed":
        inner.close()

    def outer_step(batch):
        if batch.size == size:
            if what in ("busy", "random"):
                inner.capture([1])
            else:
                inner.run(1, ONE_ROW)
        return step(batch)

    with pytest.raises(CaptureError, match=f"could not warm up batch size {size}: ") as info:
        make_runner(outer_step).capture([2, 4])
    assert isinstance(info.value.__cause__, cause)


@pytest.mark.parametrize("what", ["run", "capture", "recapture", "invalidate", "close"])
def test_calls_from_inside_the_step_are_refused(what, step, make_runner):
    arguments = {"run": (1, ONE_ROW), "invalidate": ("why",)}.get(what, ())

    def calling_step(batch):
        getattr(runner, what)(*arguments)
        return step(batch)

    runner = make_runner(calling_step)
    with pytest.raises(BusyError, match=f"{what}: the runner is in the middle of capture"):
        runner.capture([1])
    runner.close()


def test_a_second_thread_is_refused_not_queued(step, make_runner):
    entered, leave = threading.Event(), threading.Event()

    def waiting_step(batch):
        entered.set()
        leave.wait(timeout=60)
        return step(batch)

    runner = make_runner(waiting_step)
    thread = threading.Thread(target=runner.capture, args=([1],))
    thread.start()
    try:
        assert entered.wait(timeout=60)
        with pytest.raises(BusyError, match="run: the runner is in the middle of capture"):
            runner.run(1, ONE_ROW)
    finally:
        leave.set()
        thread.join(timeout=60)
    assert runner.run(1, ONE_ROW)["tokens"].tolist() == [3]


def test_while_something_hangs_on_the_device_its_pool_is_kept(monkeypatch):
    """Giving memory back to the driver would wait for what hangs."""

    def fail(batch):
        raise ValueError("no luck")

    runner = GraphRunner(fail, StaticBuffers(SPECS, 8, "cpu"))
    left, idle = [], False
    monkeypatch.setattr(runner._backend, "is_idle", lambda: idle)
    monkeypatch.setattr(runner._backend, "leave_pool", lambda: left.append(1))
    for expected in (1, 3):  # one of each is the release before the capture
        with pytest.raises(CaptureError):
            runner.capture([2])
        assert len(left) == expected
        idle = True
