"""Runs that `FastReplay` makes without a frame of Python, and what ends that."""

import gc
import os
import subprocess
import sys
import threading
import weakref
from collections import OrderedDict

import pytest
import torch
from graphs_toys import SPECS, ToyStep, toy_inputs

from forks import in_a_fork
from ostinato.graphs import (
    AsleepError,
    BusyError,
    CaptureError,
    ClosedError,
    GraphRunner,
    InvalidatedError,
    Misses,
    NotCapturedError,
    StaticBuffers,
    Variant,
    _native,
)
from ostinato.graphs.backends.cpu import CpuBackend
from ostinato.graphs.guards import RunLock

ONE_ROW = {"tokens": [1], "hidden": [[1.0, 2.0, 3.0]]}


@pytest.fixture
def fast(monkeypatch):
    """Return a function that lets a runner make no run but by repeating one."""

    def only_repeat(runner):
        def refuse(what, *_args, **_options):
            raise AssertionError(f"{what} was not repeated")

        monkeypatch.setattr(runner._lifecycle, "exclusively", refuse)

    yield only_repeat
    monkeypatch.undo()  # so that the runners can be closed


def cpu_runner(step, **options):
    return GraphRunner(step, StaticBuffers(SPECS, 8, "cpu"), **options)


def known_runner(step, **options):
    """Return a runner that knows the run of one row."""
    runner = cpu_runner(step, **options)
    runner.capture([2])
    runner.run(1, ONE_ROW)
    return runner


def test_known_runs_are_repeated_in_any_order(step, make_runner, device, fast):
    runner = make_runner(step)
    runner.capture([2, 8])
    for _ in range(2):  # a graph's first replay tells whether it has random numbers
        for n in (1, 2, 5):
            runner.run(n, toy_inputs(n, device))
    fast(runner)
    for n in (5, 5, 1, 2, 5):
        inputs = toy_inputs(n, device)
        got = runner.run(n, inputs)
        assert got["tokens"].tolist() == (2 * inputs["tokens"] + 1).tolist()
        assert got["hidden"].shape == (n, 3)
    assert [(bucket.hits, bucket.rows) for bucket in runner.stats().buckets] == [(6, 9), (5, 25)]


def test_an_equal_variant_is_the_same(step, fast):
    runner = cpu_runner(step)
    verify = Variant(4, "verify")
    runner.capture({Variant(): [2], verify: [2]})
    runner.run(1, ONE_ROW)
    runner.run(1, ONE_ROW, variant=verify)
    fast(runner)
    assert runner.run(1, ONE_ROW, variant=Variant(4, "verify"))["tokens"].tolist() == [3]
    assert runner.run(1, ONE_ROW)["tokens"].tolist() == [3]
    for variant in (Variant(3, "verify"), "verify", object()):
        with pytest.raises(AssertionError, match="was not repeated"):
            runner.run(1, ONE_ROW, variant=variant)


def test_as_many_runs_are_known_as_there_is_room_for(fast):
    runner = GraphRunner(lambda batch: batch.tokens + 1, StaticBuffers(SPECS, 129, "cpu"))
    runner.capture([129], verify=False)
    for n in range(1, 130):
        runner.run(n, toy_inputs(n))
    fast(runner)
    refused = 0
    for n in range(1, 130):
        try:
            assert runner.run(n, toy_inputs(n)).shape == (n,)
        except AssertionError:
            refused += 1
            assert n % 32 == 1  # there are five of these
    assert refused == 1


@pytest.mark.parametrize("n", [True, torch.tensor(1), 1.0, "1", 2**70, -(2**70), 0, -1, 9])
def test_what_is_no_known_number_of_rows_is_looked_at_by_python(n, step):
    runner = known_runner(step)
    try:
        expected = runner.bucket_for(n)
    except (TypeError, ValueError) as error:
        with pytest.raises(type(error)):
            runner.run(n, ONE_ROW)
    else:
        assert expected == 2
        assert runner.run(n, ONE_ROW)["tokens"].tolist() == [3]
    assert runner.run(1, ONE_ROW)["tokens"].tolist() == [3]


def test_bad_inputs_of_a_known_run_change_nothing(step):
    runner = known_runner(step)
    before = runner._buffers.view(2)["tokens"].tolist()
    for bad in ({}, {**ONE_ROW, "tokens": [1.5]}, {**ONE_ROW, "hidden": torch.zeros(2, 3)}, None):
        with pytest.raises((TypeError, ValueError)):
            runner.run(1, bad)
    assert runner._buffers.view(2)["tokens"].tolist() == before
    assert runner.stats().hits == 1
    assert runner.run(1, ONE_ROW)["tokens"].tolist() == [3]


def test_an_error_of_a_known_run_gives_the_turn_back():
    fails = []

    def step(batch):
        if fails:
            raise KeyError(fails.pop())
        return batch.tokens + 1

    runner = known_runner(step)
    fails.append("told to")
    with pytest.raises(KeyError, match="told to"):
        runner.run(1, ONE_ROW)
    assert runner.stats().hits == 1
    assert runner.run(1, ONE_ROW).tolist() == [2]


@pytest.mark.parametrize(
    ("end", "error"),
    [
        (lambda runner: runner.close(), ClosedError),
        (lambda runner: runner.sleep(), AsleepError),
        (lambda runner: runner.invalidate("new weights"), InvalidatedError),
    ],
)
def test_what_ends_a_known_run_is_said_by_name(end, error, step):
    runner = known_runner(step)
    end(runner)
    with pytest.raises(error):
        runner.run(1, ONE_ROW)


def test_a_capture_that_fails_leaves_nothing_to_repeat(step):
    fails = []

    def sometimes(batch):
        if fails:
            raise KeyError
        return step(batch)

    runner = known_runner(sometimes)
    fails.append(True)
    with pytest.raises(CaptureError):
        runner.capture([2])
    with pytest.raises(NotCapturedError):
        runner.run(1, ONE_ROW)


def test_no_fast_replay_while_a_runner_waits_to_be_closed(step):
    runner = known_runner(step)
    with _native.PendingCloses(runner._backend.run_lock):  # of another runner
        assert runner._fast_replay.run(runner, 1, ONE_ROW, Variant()) is None
        assert runner.run(1, ONE_ROW)["tokens"].tolist() == [3]
    assert runner._fast_replay.run(runner, 1, ONE_ROW, Variant())["tokens"].tolist() == [3]


def test_each_known_run_makes_a_dict_of_another_class_anew():
    runner = known_runner(lambda batch: OrderedDict(tokens=batch.tokens + 1))
    for _ in range(2):
        outputs = runner._fast_replay.run(runner, 1, ONE_ROW, Variant())
        assert type(outputs) is OrderedDict
        assert outputs.pop("tokens").tolist() == [2]


def test_a_fork_repeats_nothing(step):
    runner = known_runner(step)
    assert in_a_fork(lambda: runner.run(1, ONE_ROW)) == "ForkedError"
    assert runner.run(1, ONE_ROW)["tokens"].tolist() == [3]

    def child():
        own = known_runner(ToyStep())
        assert own.run(1, ONE_ROW)["tokens"].tolist() == [3]
        assert own._fast_replay.run(own, 1, ONE_ROW, Variant())["tokens"].tolist() == [3]

    assert in_a_fork(child) == "nothing"


def test_calls_from_inside_a_known_run_are_refused(step):
    calls = []

    def nosy(batch):
        for call in calls:
            with pytest.raises(BusyError, match="the runner is in the middle of run"):
                call()
        return step(batch)

    runner = known_runner(nosy)
    calls += [lambda: runner.run(1, ONE_ROW), runner.recapture, runner.sleep, runner.close]
    for _ in range(2):
        assert runner.run(1, ONE_ROW)["tokens"].tolist() == [3]


def test_runners_of_a_pool_may_take_turns_without_forgetting(step, monkeypatch, fast):
    shared = RunLock()
    monkeypatch.setattr("ostinato.graphs.backends.cpu.RunLock", lambda: shared)
    runners = [cpu_runner(step) for _ in range(2)]
    for runner in runners:
        runner.capture([2])
    for runner in runners:
        runner.run(1, ONE_ROW)
    with pytest.MonkeyPatch.context() as patch:
        for runner in runners:
            patch.setattr(runner._lifecycle, "exclusively", None)
        for runner in runners * 2:
            assert runner.run(1, ONE_ROW)["tokens"].tolist() == [3]
    runners[0].check_memory()  # anything else makes all forget
    fast(runners[1])
    with pytest.raises(AssertionError, match="was not repeated"):
        runners[1].run(1, ONE_ROW)


def test_memory_that_moves_is_found_by_known_runs(step):
    places = [torch.zeros(4) for _ in range(40)]
    runner = known_runner(step, memory={"cache": places})
    places[20].resize_(1 << 16)

    def run_often():
        for _ in range(28):
            runner.run(1, ONE_ROW)

    with pytest.raises(InvalidatedError, match="tensor 20 has moved"):
        run_often()
    with pytest.raises(InvalidatedError):
        runner.run(1, ONE_ROW)


def test_few_tensors_are_looked_at_by_every_run(step, fast):
    places = [torch.zeros(4), torch.zeros(4)]
    runner = known_runner(step, memory={"cache": places})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner._lifecycle, "exclusively", None)
        for _ in range(20):
            runner.run(1, ONE_ROW)
    places[1].resize_(1 << 16)
    with pytest.raises(InvalidatedError, match="tensor 1 has moved"):
        runner.run(1, ONE_ROW)


def test_what_is_observed_or_limited_is_not_repeated(step):
    runner = known_runner(step)
    runner.observe(replay_times=True)
    for _ in range(3):
        runner.run(1, ONE_ROW)
    assert runner.stats().replay_us.count == 3
    runner.capture([2], misses=Misses("capture", max_graphs=1, batch_sizes=[1, 2]))
    for n in (1, 2, 1, 2):
        runner.run(n, toy_inputs(n))
    assert runner.stats().evictions == 4


def test_a_recapture_is_what_runs_from_then_on():
    factor = [2]
    runner = known_runner(lambda batch: batch.tokens * factor[0])
    factor[0] = 3
    runner.recapture()
    assert runner.run(1, ONE_ROW).tolist() == [3]
    assert runner.run(1, ONE_ROW).tolist() == [3]
    assert runner.stats().hits == 2


def test_a_runner_that_its_step_refers_to_is_collected():
    def make():
        own = []

        def step(batch):
            return batch.tokens + len(own)

        runner = known_runner(step)
        own.append(runner)
        assert runner.run(1, ONE_ROW).tolist() == [2]
        return weakref.ref(runner), weakref.ref(runner._buffers)

    references = make()
    gc.collect()
    assert [reference() for reference in references] == [None, None]


def test_outputs_that_were_let_go_of_are_not_kept_by_known_runs(step):
    runner = known_runner(step)
    kept = weakref.ref(runner._captured.table.find(1, Variant()).graph)
    runner.sleep()
    gc.collect()
    assert kept() is None


class Machine:
    """A GPU's streams and devices as the hot path asks for them, for a runner on the CPU."""

    def __init__(self, monkeypatch, devices=1):
        self.stream, self.device = 16, 0
        several = (lambda: self.device) if devices > 1 else None
        monkeypatch.setattr(
            CpuBackend,
            "fast_replay",
            lambda _: _native.FastReplay(lambda _index: self.stream, 0, several),
        )
        self.followed = []

        def follow(backend):
            self.followed.append(self.stream)
            backend.run_lock.last_stream = self.stream
            return False

        monkeypatch.setattr(CpuBackend, "follow", follow)


def test_only_runs_on_the_last_stream_are_repeated(step, monkeypatch):
    machine = Machine(monkeypatch)
    runner = known_runner(step)
    machine.followed.clear()
    for stream in (16, 32, 32, 16, 16, 2**63 - 1, 2**63 - 1, 0, 0):
        machine.stream = stream
        assert runner.run(1, ONE_ROW)["tokens"].tolist() == [3]
    assert machine.followed == [32, 16, 2**63 - 1, 0]


def test_a_stream_that_may_be_gone_repeats_nothing(step, monkeypatch):
    machine = Machine(monkeypatch)
    runner = known_runner(step)
    machine.followed.clear()
    runner._backend.run_lock.last_stream = -1
    runner.run(1, ONE_ROW)
    assert machine.followed == [16]


def test_only_runs_on_the_graphs_device_are_repeated(step, monkeypatch):
    machine = Machine(monkeypatch, devices=2)
    runner = known_runner(step)
    machine.followed.clear()
    for device in (0, 1, 1, 0):
        machine.device = device
        runner.run(1, ONE_ROW)
    assert machine.followed == [16, 16]


def test_errors_of_what_is_asked_are_raised(step, monkeypatch):
    machine = Machine(monkeypatch)
    runner = known_runner(step)
    machine.stream = "no handle"
    with pytest.raises((TypeError, SystemError)):
        runner.run(1, ONE_ROW)
    machine.stream = 16
    assert runner.run(1, ONE_ROW)["tokens"].tolist() == [3]


def test_threads_get_their_own_rows_or_are_refused():
    runner = known_runner(lambda batch: batch.tokens + 1)
    start, wrong, served = threading.Barrier(4), [], []

    def run_often(base):
        start.wait()
        for index in range(300):
            token = base + index
            try:
                with lock:  # outputs are the next run's
                    got = runner.run(1, {**ONE_ROW, "tokens": [token]}).item()
                served.append(token)
                if got != token + 1:
                    wrong.append((token, got))
            except BusyError:
                pass

    lock = threading.Lock()
    threads = [threading.Thread(target=run_often, args=(1000 * i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    start.wait()
    for _ in range(50):
        try:
            runner.check_memory()
        except BusyError:
            continue
    for thread in threads:
        thread.join(timeout=60)
    assert not wrong
    assert runner.stats().hits == 1 + len(served)


def test_what_is_learnt_is_checked():
    repeat, run_lock, counts = _native.FastReplay(), RunLock(), _native.RunCounts()
    known = {
        "run_lock": run_lock,
        "n": 1,
        "variant": Variant(),
        "batch_size": 2,
        "stager": object(),
        "executable": 0,
        "replay": lambda: None,
        "counts": counts,
        "look": lambda: None,
        "runs_per_look": 8,
        "rows": ("rows", []),
        "remake": lambda n: n,
    }
    for change, error in (
        ({"n": 0}, ValueError),
        ({"counts": object()}, TypeError),
        ({"run_lock": object()}, TypeError),
        ({"rows": []}, TypeError),
    ):
        with pytest.raises(error):
            repeat.learn(**{**known, **change})
    repeat.learn(**known)
    with pytest.raises(ValueError, match="another run lock"):
        repeat.learn(**{**known, "run_lock": RunLock()})
    with pytest.raises(TypeError, match="got 1 arguments, expected 4"):
        repeat.run(1)
    with pytest.raises(AttributeError, match="stage"):
        repeat.run(None, 1, {}, Variant())
    assert run_lock.take(None, "test")  # which the failed run has given back
    assert counts.read() == (0, 0, 0)


def test_references_are_given_back(step):
    runner = known_runner(step)
    replay = runner._captured.table.find(1, Variant()).graph

    def counts():
        return [sys.getrefcount(thing) for thing in (replay, runner._buffers, runner, None)][:3]

    before = counts()
    for index in range(200):
        runner.run(1, ONE_ROW)
        if index % 5 == 0:
            runner.check_memory()  # which forgets
            runner.run(1, ONE_ROW)
        with pytest.raises(ValueError, match="inputs: missing"):
            runner.run(1, {})
    assert counts() == before


_LAST_REFERENCE = """
import gc
from ostinato.graphs import _native

class Buffers:
    def stage(self, *_):
        pass

def nothing():
    pass

gc.disable()
for _ in range(20):
    run_lock, repeat = _native.RunLock(), _native.FastReplay()
    buffers, counts = Buffers(), _native.RunCounts()

    def replay(held=repeat):
        pass

    for n in range(1, 100):
        repeat.learn(
            run_lock=run_lock, n=n, variant=("v", n), batch_size=n, stager=buffers, executable=0,
            replay=replay, counts=counts, look=nothing, runs_per_look=1, rows=(None, []),
            remake=nothing,
        )
    del replay, repeat
    run_lock.forget()
"""


def test_a_run_lock_forgets_runs_that_hold_their_replayer():
    # What is freed is overwritten, so that reading it does not go well by chance.
    environment = {**os.environ, "PYTHONMALLOC": "debug"}
    script = [sys.executable, "-c", _LAST_REFERENCE]
    done = subprocess.run(script, env=environment, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr.decode()
