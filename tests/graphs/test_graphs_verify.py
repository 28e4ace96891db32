"""Verification finds every way in which a replay can differ from the step."""

import json

import pytest
import torch
from graphs_toys import SPECS, toy_inputs

from ostinato.graphs import (
    BufferSpec,
    CaptureError,
    CaptureReport,
    GraphReport,
    GraphRunner,
    NotCapturedError,
    StaticBuffers,
    VerificationError,
)
from ostinato.graphs.backends.cpu import CpuBackend
from ostinato.graphs.graph_key import Key
from ostinato.graphs.verify import find_difference


def test_random_numbers_are_found_and_named(make_runner):
    def step(batch):
        return {"tokens": batch.tokens + 0, "noise": torch.rand_like(batch.hidden)}

    runner = make_runner(step)
    with pytest.raises(VerificationError, match="batch size 4 with 1 real rows") as info:
        runner.capture([2, 4])
    assert "output['noise'] in 3 of 3 values, 1 of 1 rows, first at [0, 0]: step 0." in str(
        info.value
    )
    assert "two results for the same inputs" in str(info.value)
    assert "torch.use_deterministic_algorithms" in str(info.value)
    with pytest.raises(NotCapturedError):
        runner.run(1, toy_inputs(1))


def test_one_rows_difference_is_counted_as_one(make_runner):
    toggles = []

    def step(batch):
        toggles.append(None)
        changed = torch.zeros_like(batch.hidden)
        changed[-1] = len(toggles)
        return batch.hidden + changed

    with pytest.raises(VerificationError, match=r"output in 3 of 9 values, 1 of 3 rows, first at"):
        make_runner(step).capture([3])


def test_state_that_is_read_and_changed_is_found(make_runner, device):
    count = torch.zeros(1, dtype=torch.int64, device=device)
    runner = make_runner(lambda batch: batch.tokens + count.add_(1))
    with pytest.raises(VerificationError, match="reads state that it also changes"):
        runner.capture([2])


def test_python_state_is_found(make_runner):
    calls = []

    def step(batch):
        calls.append(batch.size)
        return batch.tokens + len(calls)

    with pytest.raises(VerificationError, match="batch size 2 with 1 real rows"):
        make_runner(step).capture([2])


def test_without_verification_such_a_step_is_captured(make_runner):
    runner = make_runner(lambda batch: torch.rand_like(batch.hidden))
    report = runner.capture([2], verify=False)
    assert [graph.verdict for graph in report.graphs] == ["not verified"]
    assert runner.run(2, toy_inputs(2)).shape == (2, 3)


@pytest.mark.parametrize(
    "step",
    [
        lambda batch: batch.hidden / 0,
        lambda batch: (batch.hidden * float("nan"), batch.tokens == 3),
        lambda batch: batch.tokens.to(torch.uint8),
        lambda batch: batch.hidden.to(torch.float8_e4m3fn),
        lambda batch: batch.hidden.to(torch.bfloat16),
        lambda batch: batch.hidden.to(torch.complex64),
        lambda batch: batch.hidden.double(),
        lambda batch: batch.tokens[:, None].expand(-1, 5),
        lambda batch: batch.tokens,
        lambda batch: batch.tokens.add_(1),
        lambda batch: (batch.hidden, batch.hidden[:, 0]),
    ],
)
def test_every_dtype_and_view_is_verified(step, make_runner):
    report = make_runner(step).capture([1, 4])
    assert [graph.verdict for graph in report.graphs] == ["bit-equal"] * 2


class TellingBackend(CpuBackend):
    """Lets a step know that it is replayed, which on a GPU it could not: it is not called then."""

    replaying = False

    def capture(self, step, batch):
        graph = super().capture(step, batch)
        replay = graph.replay

        def telling_replay():
            self.replaying = True
            replay()
            self.replaying = False

        graph.replay = telling_replay
        return graph

    def difference(self, step, buffers, bucket):
        """Capture the step and return how a replay differs from a call."""
        graph = self.capture(step, buffers.view(bucket))
        return find_difference(step, buffers, self, graph, Key(bucket))


def test_signed_zeros_differ():
    backend = TellingBackend()

    def step(batch):
        return torch.full_like(batch.hidden, -0.0 if backend.replaying else 0.0)

    difference = backend.difference(step, StaticBuffers(SPECS, 8, "cpu"), 1)
    assert difference.endswith("step 0.0, replay -0.0")


@pytest.mark.parametrize("bucket", [1, 4])
def test_results_left_over_from_the_step_itself_are_found(bucket):
    backend = TellingBackend()
    scratch = torch.zeros(bucket, 3)

    def step(batch):
        if not backend.replaying:  # as if it were launched outside of the captured stream
            torch.mul(batch.hidden, 2, out=scratch)
        return scratch + 1

    difference = backend.difference(step, StaticBuffers(SPECS, 8, "cpu"), bucket)
    assert f"batch size {bucket} with {bucket} real rows: the replay differs" in difference


def test_outputs_left_over_in_memory_of_the_step_are_found():
    backend = TellingBackend()
    result = torch.zeros(2, 3)

    def step(batch):
        if not backend.replaying:
            torch.mul(batch.hidden, 2, out=result)
        return result

    assert backend.difference(step, StaticBuffers(SPECS, 8, "cpu"), 2) is not None


INTEGERS = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]


@pytest.mark.parametrize("dtype", [*INTEGERS, torch.uint16, torch.uint32, torch.uint64])
def test_outputs_of_every_integer_type_are_poisoned_and_compared(dtype):
    backend = TellingBackend()
    specs = {"x": BufferSpec((), torch.bool, False)}

    def step(batch):
        return torch.ones(batch.size, dtype=torch.bool).to(dtype)

    assert backend.difference(step, StaticBuffers(specs, 4, "cpu"), 2) is None

    class Idle(TellingBackend):
        """Its replays write nothing."""

        def capture(self, step, batch):
            graph = super().capture(step, batch)
            graph.replay = lambda: None
            return graph

    difference = Idle().difference(step, StaticBuffers(specs, 4, "cpu"), 2)
    assert "output in 1 of 1 values" in difference


def test_results_beyond_the_real_rows_may_differ(make_runner):
    def step(batch):
        index = torch.arange(batch.size, device=batch.tokens.device)
        noise = torch.rand(batch.size, device=batch.tokens.device)
        return torch.where(index < batch.n_active, batch.hidden[:, 0], noise)

    make_runner(step).capture([1, 4])


def test_verification_draws_examples_and_pads_the_rest(device):
    drawn, seen = [], []

    def example(generator, shape):
        drawn.append(shape)
        return torch.randint(50, 60, shape, generator=generator)

    specs = {
        "x": BufferSpec((2,), torch.int32, -1, example),
        "y": BufferSpec((), torch.float32, 0.5),
    }
    buffers = StaticBuffers(specs, 4, device)

    def step(batch):
        if not torch.cuda.is_available() or not torch.cuda.is_current_stream_capturing():
            seen.append((batch.n_active.item(), batch.x.tolist(), batch.y.tolist()))
        return batch.x + 1

    with GraphRunner(step, buffers) as runner:
        runner.capture([4])
    assert drawn == [(1, 2), (2, 2), (4, 2)]
    assert {n for n, _, _ in seen} == {0, 1, 2, 4}
    for n, x, y in seen:
        assert all(50 <= value < 60 for row in x[:n] for value in row)
        assert x[n:] == [[-1, -1]] * (4 - n)
        assert y == [0.5] * 4


def test_verdict_names_the_buffers_that_were_verified_as_padding(device):
    specs = {
        "positions": BufferSpec((), torch.int64, 0),
        "tokens": SPECS["tokens"],
        "slots": BufferSpec((), torch.int64, 0),
    }
    with GraphRunner(lambda batch: batch.tokens + 1, StaticBuffers(specs, 4, device)) as runner:
        report = runner.capture([4])
        assert [graph.verdict for graph in report.graphs] == [
            "bit-equal (positions, slots at padding)"
        ]
        report = runner.capture([4], verify=False)
        assert [graph.verdict for graph in report.graphs] == ["not verified"]


@pytest.mark.parametrize(
    ("example", "match"),
    [
        (lambda generator, shape: [1, 2], r"specs\['x'\].example: returned list"),
        (lambda generator, shape: torch.zeros(9), r"specs\['x'\].example: returned \(9,\)"),
    ],
)
def test_bad_examples(example, match, device):
    buffers = StaticBuffers({"x": BufferSpec((), torch.int64, 0, example)}, 2, device)
    with (
        GraphRunner(lambda batch: batch.x + 1, buffers) as runner,
        pytest.raises(CaptureError, match=f"could not verify batch size 2: ValueError: {match}"),
    ):
        runner.capture([2])


def test_report_has_what_was_measured(step, make_runner, device):
    report = make_runner(step).capture([1, 4])
    assert [graph.batch_size for graph in report.graphs] == [1, 4]
    for graph in report.graphs:
        assert graph.verdict == "bit-equal"
        assert min(graph.warmup_ms, graph.capture_ms, graph.verify_ms) > 0
        assert (graph.pool_mib is None) == (device.type == "cpu")
        assert (graph.device_mib is None) == (device.type == "cpu")
        assert report.total_ms > graph.warmup_ms + graph.capture_ms + graph.verify_ms
    loaded = json.loads(report.to_json())
    assert loaded["device"] == report.device
    assert [graph["batch_size"] for graph in loaded["graphs"]] == [1, 4]
    assert set(loaded["graphs"][0]) == set(GraphReport.__dataclass_fields__)


def test_a_reports_notes_are_shown_and_kept():
    notes = ({"embed": "kernel"}, {"linear": "torch"})
    first, second = (CaptureReport("cpu", 1.0, (), notes=words) for words in notes)
    both = first + second
    assert both.notes == {"embed": "kernel", "linear": "torch"}
    assert str(both).splitlines()[-2:] == ["embed: kernel", "linear: torch"]
    assert json.loads(both.to_json())["notes"] == both.notes


def test_report_is_a_table():
    report = CaptureReport(
        device="NVIDIA H200",
        total_ms=1234.56,
        graphs=(
            GraphReport(1, 10.0, 5.25, None, 2.0, 4.5, "not verified"),
            GraphReport(128, 20.0, 6.0, 30.125, None, None, "bit-equal"),
        ),
    )
    title, header, first, second = str(report).splitlines()
    assert title == "2 batch sizes captured on NVIDIA H200 in 1234.6 ms"
    assert header.split("  ")[-1] == "verdict"
    assert first.split() == ["1", "10.00", "5.25", "-", "2.00", "4.50", "not", "verified"]
    assert second.split() == ["128", "20.00", "6.00", "30.12", "-", "-", "bit-equal"]
    assert len({line.index(end) for line, end in ((header, "verdict"), (first, "not"))}) == 1
