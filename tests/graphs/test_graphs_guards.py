"""Forks, memory that moves, captures and pools in two places."""

import os
import threading

import pytest
import torch
from graphs_toys import SPECS, ToyStep, toy_inputs
from hypothesis import given
from hypothesis import strategies as st

from forks import in_a_fork
from ostinato.graphs import (
    BusyError,
    CaptureError,
    ForkedError,
    GraphRunner,
    InvalidatedError,
    StaticBuffers,
)
from ostinato.graphs.declared_memory import stored
from ostinato.graphs.guards import MemoryWatch, RunLock, only_capture, run_lock_of

ONE_ROW = {"tokens": [1], "hidden": [[1.0, 2.0, 3.0]]}


def cpu_runner(step, **options):
    return GraphRunner(step, StaticBuffers(SPECS, 8, "cpu"), **options)


def run_times(runner, count):
    for _ in range(count):
        runner.run(1, ONE_ROW)


def test_a_fork_of_the_process_is_refused_and_the_parent_goes_on(step):
    runner = cpu_runner(step)
    runner.capture([2])
    runner.run(1, ONE_ROW)
    for call in (
        lambda: runner.run(1, ONE_ROW),
        runner.capture,
        runner.recapture,
        lambda: runner.invalidate("why"),
    ):
        assert in_a_fork(call) == "ForkedError"
    assert in_a_fork(runner.close) == "nothing"
    assert runner.run(1, ONE_ROW)["tokens"].tolist() == [3]


def test_what_a_runner_has_can_be_asked_for_in_a_fork(step):
    runner = cpu_runner(step)
    runner.capture([1, 4])
    runner.run(1, ONE_ROW)

    def ask():
        return [
            runner.stats(),
            runner.keys,
            runner.batch_sizes,
            runner.max_batch_size,
            runner.bucket_for(3),
            runner.require_captured(),
        ]

    def compare():
        assert ask() == told

    told = ask()
    assert in_a_fork(compare) == "nothing"


def test_a_fork_beside_a_capture_may_capture():
    def capture():
        with only_capture():
            pass

    with only_capture():
        assert in_a_fork(capture) == "nothing"
        with pytest.raises(BusyError):
            capture()


def test_the_refusal_of_a_fork_says_what_to_do(step, monkeypatch):
    runner = cpu_runner(step)
    runner.capture([2])
    here = os.getpid()
    monkeypatch.setattr(runner._lifecycle._process, "is_fork", True)
    with pytest.raises(ForkedError, match=f"made in process {here}, and this is a fork of it"):
        runner.run(1, ONE_ROW)


def test_a_child_that_makes_its_own_runner_works():
    def child():
        runner = cpu_runner(ToyStep())
        runner.capture([2], verify=False)
        assert runner.run(1, ONE_ROW)["tokens"].tolist() == [3]

    assert in_a_fork(child) == "nothing"


@pytest.mark.parametrize(
    "move",
    [
        lambda module: setattr(module, "bias", torch.nn.Parameter(torch.zeros(3))),
        lambda module: setattr(module.bias, "data", torch.zeros(3)),
        lambda module: setattr(module, "bias", None),
        lambda module: module.double(),
    ],
)
def test_weights_that_move_are_refused_by_name_until_recapture(move):
    model = torch.nn.Sequential(torch.nn.Linear(3, 3))

    def step(batch):
        out = batch.hidden @ model[0].weight.float()
        return out if model[0].bias is None else out + model[0].bias.float()

    runner = cpu_runner(step, memory={"weights": model})
    runner.capture([2])
    runner.run(1, ONE_ROW)
    move(model[0])
    message = r"memory\['weights'\], 0\.(bias|weight) has moved since the capture"
    for _ in range(2):
        with pytest.raises(InvalidatedError, match=message):
            runner.run(1, ONE_ROW)
    runner.recapture()
    runner.run(1, ONE_ROW)


def test_weights_that_change_in_place_are_welcome():
    model = torch.nn.Linear(3, 3)
    runner = cpu_runner(lambda batch: model(batch.hidden), memory={"weights": model})
    runner.capture([2])
    with torch.no_grad():
        model.weight.zero_()
        model.bias.fill_(5.0)
    runner.check_memory()
    assert runner.run(1, ONE_ROW).tolist() == [[5.0] * 3]


def test_a_cache_that_is_resized_is_noticed():
    cache = [torch.zeros(4), torch.zeros(4)]
    runner = cpu_runner(ToyStep(), memory={"cache": cache, "one": torch.zeros(2)})
    runner.capture([2])
    cache[1].resize_(1 << 20)
    with pytest.raises(InvalidatedError, match=r"memory\['cache'\], tensor 1 has moved"):
        runner.check_memory()
    with pytest.raises(InvalidatedError, match="has moved"):
        runner.run(1, ONE_ROW)


def test_runs_look_at_two_tensors_each_on_average():
    weights = [torch.zeros(4) for _ in range(100)]
    runner = cpu_runner(ToyStep(), memory={"weights": weights})
    runner.capture([2])
    weights[99].data = torch.zeros(4)
    with pytest.raises(InvalidatedError, match="tensor 99"):
        run_times(runner, 100 // 2 + 8)
    assert 100 // 2 - 8 <= runner.stats().hits <= 100 // 2 + 8


@pytest.mark.parametrize("count", [1, 2, 3, 16, 40])
def test_moved_memory_is_found_within_bounded_runs(count):
    weights = [torch.zeros(4) for _ in range(count)]
    runner = cpu_runner(ToyStep(), memory={"weights": weights})
    runner.capture([2])
    most = -(-count // 2) + min(max(count // 4, 1), 8)
    for moved in (0, count // 2, count - 1):
        run_times(runner, 5)
        weights[moved].data = torch.zeros(4)
        with pytest.raises(InvalidatedError, match=f"tensor {moved} has moved"):
            run_times(runner, most)
        runner.recapture()


@given(st.integers(1, 40), st.integers(1, 50), st.data())
def test_a_watch_finds_what_moved_within_two_rounds(count, step, data):
    tensors = [torch.zeros(1) for _ in range(count)]
    watch = MemoryWatch({"x": tensors})
    watch.note()
    for _ in range(data.draw(st.integers(0, 5))):
        assert watch.moved(step) is None
    moved = data.draw(st.integers(0, count - 1))
    tensors[moved].data = torch.zeros(2)
    # The round that is under way may have passed it, and its last look be a short one.
    found = [watch.moved(step) for _ in range(2 * -(-count // step))]
    assert f"memory['x'], tensor {moved}" in found


class Wrapper(torch.Tensor):
    """A tensor that stands for another, as a DTensor for its part on this device."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    def __tensor_flatten__(self):
        return ["inner"], None

    @classmethod
    def __torch_dispatch__(cls, function, _types, arguments=(), keywords=None):
        plain = [a.inner if isinstance(a, Wrapper) else a for a in arguments]
        return function(*plain, **(keywords or {}))


@pytest.mark.parametrize("kind", ["module", "list"])
def test_what_a_tensor_wraps_is_watched(kind):
    holder = torch.nn.Module()
    holder.register_buffer("weight", Wrapper(torch.ones(4)))
    memory = {"it": holder if kind == "module" else [holder.weight]}
    runner = cpu_runner(ToyStep(), memory=memory)
    runner.capture([1])
    runner.check_memory()
    if kind == "module":
        holder.weight = Wrapper(torch.ones(4))
        name = r"memory\['it'\], weight"
    else:
        memory["it"][0].inner = torch.zeros(4)
        name = r"memory\['it'\], tensor 0"
    with pytest.raises(InvalidatedError, match=name):
        runner.check_memory()


def test_memory_that_is_sparse_is_named():
    with pytest.raises(TypeError, match=r"memory\['it'\]: got torch.sparse_coo, expected strided"):
        cpu_runner(ToyStep(), memory={"it": torch.eye(2).to_sparse()})


def test_modules_may_be_initialised_by_the_first_warm_up():
    lazy, unused = torch.nn.LazyLinear(2), torch.nn.LazyLinear(3)
    memory = {"lazy": torch.nn.ModuleList([lazy, unused])}
    runner = cpu_runner(lambda batch: lazy(batch.hidden), memory=memory)
    runner.capture([1])
    assert runner.run(1, ONE_ROW).shape == (1, 2)
    lazy.weight = torch.nn.Parameter(lazy.weight.detach().clone())
    with pytest.raises(InvalidatedError, match="weight has moved"):
        runner.check_memory()


def test_what_is_uninitialised_holds_nothing():
    assert list(stored(torch.nn.UninitializedParameter())) == []
    plain = torch.zeros(2)
    assert list(stored(Wrapper(plain))) == [plain]


def test_nothing_declared_is_nothing_watched():
    watch = MemoryWatch(None)
    assert (watch.moved(), watch.moved(8)) == (None, None)


def test_two_captures_at_once_are_refused_and_the_first_goes_on(make_runner):
    entered, leave, toy = threading.Event(), threading.Event(), ToyStep()

    def waiting_step(batch):
        if len(toy.calls) == 2:  # in the capture
            entered.set()
            leave.wait(timeout=60)
        return toy(batch)

    first, second = make_runner(waiting_step), make_runner(ToyStep())
    thread = threading.Thread(target=first.capture, args=([2],))
    thread.start()
    try:
        assert entered.wait(timeout=60)
        with pytest.raises(BusyError, match="another runner is being captured: one at a time"):
            second.capture([2])
    finally:
        leave.set()
        thread.join(timeout=60)
    assert first.run(1, ONE_ROW)["tokens"].tolist() == [3]
    second.capture([2])
    assert second.run(1, ONE_ROW)["tokens"].tolist() == [3]


def test_a_capture_inside_a_capture_is_a_failure_of_the_step(make_runner):
    toy, inner = ToyStep(), make_runner(ToyStep())

    def step(batch):
        if len(toy.calls) == 2:
            inner.capture([1])
        return toy(batch)

    runner = make_runner(step)
    with pytest.raises(CaptureError, match="could not capture batch size 2") as info:
        runner.capture([2])
    assert isinstance(info.value.__cause__, BusyError)
    runner.capture([2])
    assert runner.run(1, ONE_ROW)["tokens"].tolist() == [3]


def test_the_place_of_a_capture_is_given_back_after_a_failure():
    with pytest.raises(KeyError), only_capture():
        raise KeyError
    with only_capture(), pytest.raises(BusyError), only_capture():
        pass


def test_runners_of_one_pool_take_turns(step, monkeypatch):
    runners = [cpu_runner(step) for _ in range(2)]
    for runner in runners:
        runner.capture([2])
        monkeypatch.setattr(runner._backend, "run_lock", runners[0]._backend.run_lock)
    assert runners[0]._backend.run_lock.take(runners[0], "run")
    with pytest.raises(BusyError, match="run: another runner of the same pool is in the middle"):
        runners[1].run(1, ONE_ROW)
    with pytest.raises(BusyError, match="close: the runner is in the middle of run"):
        runners[0].close()
    runners[0]._backend.run_lock.end()
    assert runners[1].run(1, toy_inputs(1) | {"tokens": [1]})["tokens"].tolist() == [3]


def test_runners_of_one_pool_must_share_the_stream():
    first = run_lock_of((7, 1), stream=10)
    assert run_lock_of((7, 1), stream=10) is first
    with pytest.raises(ValueError, match=r"pool: got \(7, 1\), which another runner uses on"):
        run_lock_of((7, 1), stream=11)
    assert run_lock_of((7, 2), stream=11) is not first
    assert run_lock_of(None, stream=10) is not first
    del first
    assert isinstance(run_lock_of((7, 1), stream=11), RunLock)  # once the runners are gone
