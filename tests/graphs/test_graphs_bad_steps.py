"""What steps do that a graph cannot: each is named, and the process is healthy afterwards."""

import pytest
import torch
from graphs_fakes import RecordingBackend
from graphs_toys import SPECS, ToyStep, toy_inputs

from ostinato.graphs import CaptureError, GraphRunner, StaticBuffers, VerificationError
from ostinato.graphs.inspect.nodes import GraphNodes

ONE_ROW = {"tokens": [1], "hidden": [[1.0, 2.0, 3.0]]}


def assert_healthy(runner):
    """Check that the runner captures and runs."""
    runner.capture([1, 2, 4])
    assert runner.run(3, toy_inputs(3) | {"tokens": [1, 2, 3]})["tokens"].tolist() == [3, 5, 7]


def test_out_of_memory_at_the_third_of_five_captures(monkeypatch):
    backend, captures = RecordingBackend(GraphNodes((), ())), []

    def on_capture():
        captures.append(1)
        if len(captures) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB")

    released = []
    release = backend.release
    monkeypatch.setattr(backend, "release", lambda g: (released.append(len(g)), release(g)))
    backend.on_capture = on_capture
    monkeypatch.setattr("ostinato.graphs.runner.backend_for", lambda *a: backend)
    runner = GraphRunner(ToyStep(), StaticBuffers(SPECS, 16, "cpu"))
    match = "could not capture batch size 4: OutOfMemoryError(.|\n)*remedy: the device is out of"
    with pytest.raises(CaptureError, match=match):
        runner.capture([1, 2, 4, 8, 16])
    assert released == [2]  # those captured before, of 16 and of 8
    assert runner.keys == ()
    assert_healthy(runner)


def test_a_list_that_grows_with_every_call_is_found(make_runner):
    history = []

    def step(batch):
        if growing:
            history.append(batch.tokens.float().mean())
            return {"tokens": 2 * batch.tokens + 1, "mean": batch.hidden + sum(history)}
        return toy(batch)

    toy, growing = ToyStep(), True
    runner = make_runner(step)
    with pytest.raises(VerificationError, match=r"output\['mean'\].*reads state that it also"):
        runner.capture([2])
    growing = False
    history.clear()
    assert_healthy(runner)


def test_a_step_that_branches_on_python_state_is_found(make_runner):
    state = {"calls": 0}

    def step(batch):
        state["calls"] += 1
        flips = flipping * (state["calls"] % 3)
        return {"tokens": 2 * batch.tokens + 1 + flips}

    flipping = True
    runner = make_runner(step)
    with pytest.raises(VerificationError, match="batch size 2 with 1 real rows"):
        runner.capture([2])
    flipping = False
    assert_healthy(runner)


def test_a_generator_of_the_steps_own_is_found(make_runner, device):
    """On a GPU the capture refuses it; without one the verification finds it."""
    generator = torch.Generator(device).manual_seed(1)
    toy, drawing = ToyStep(), True

    def step(batch):
        noise = torch.rand(batch.size, device=device, generator=generator) if drawing else 0
        return {"tokens": toy(batch)["tokens"], "noise": batch.tokens + noise}

    runner = make_runner(step)
    error = CaptureError if device.type == "cuda" else VerificationError
    with pytest.raises(error, match="random numbers"):
        runner.capture([2])
    drawing = False
    assert_healthy(runner)


def test_batch_sizes_that_shrink_after_a_capture(step, make_runner):
    runner = make_runner(step)
    runner.capture([1, 4, 8])
    large = toy_inputs(8)
    runner.run(8, large)
    runner.capture([1, 4])
    with pytest.raises(ValueError, match="n: got 8 rows, expected 1 to 4, the largest captured"):
        runner.run(8, large)
    assert runner.run(1, ONE_ROW)["tokens"].tolist() == [3]
    assert_healthy(runner)


def test_outputs_that_shrink_after_a_capture_are_refused(make_runner):
    """A GPU replays what was captured; on a CPU, where the step is called, it is refused."""
    captured = False

    def step(batch):
        return batch.tokens[: batch.size - captured] + 0

    runner = GraphRunner(step, StaticBuffers(SPECS, 8, "cpu"))
    runner.capture([4])
    captured = True
    with pytest.raises(ValueError, match=r"output has shape \(3,\), expected a row for each of 4"):
        runner.run(4, toy_inputs(4))
    captured = False
    assert runner.run(4, toy_inputs(4) | {"tokens": range(4)}).tolist() == [0, 1, 2, 3]


def test_steps_that_print_raise_or_allocate_are_captured(make_runner, capsys):
    def step(batch):
        print("called with", batch.size)
        return {"tokens": torch.empty_like(batch.tokens).copy_(2 * batch.tokens + 1)}

    runner = make_runner(step)
    runner.capture([4])
    assert "called with 4" in capsys.readouterr().out
    assert_healthy(runner)
