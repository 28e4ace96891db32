"""Capture and replay: what a runner does and returns."""

import gc
import io
import math
import sys
import threading
from collections import OrderedDict, defaultdict
from typing import NamedTuple

import numpy as np
import pytest
import torch
from graphs_toys import PAD_TOKEN, SPECS, toy_inputs
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ostinato.graphs import Add, BufferSpec, BurstRules, Feed, GraphRunner, Slot, StaticBuffers
from ostinato.graphs.buffer_spec import _has_infinity

ONE_ROW = {"tokens": [1], "hidden": [[1.0, 2.0, 3.0]]}


def assert_equals_step(outputs, step, inputs, bucket, buffers):
    """Compare a run's outputs with a direct call of the step on buffers of its own."""
    n = len(inputs["tokens"])
    buffers.stage(inputs, n, bucket)
    expected = step(buffers.view(bucket))
    assert outputs.keys() == expected.keys()
    for name, rows in outputs.items():
        assert torch.equal(rows, expected[name][:n])


@pytest.mark.parametrize("batch_sizes", [None, [8], [1, 8], [3, 5, 8]])
@pytest.mark.parametrize("on_device", [False, True])
def test_run_equals_the_step_for_every_n(batch_sizes, on_device, step, make_runner, buffers):
    runner = make_runner(step)
    runner.capture(batch_sizes)
    for n in range(1, 9):
        inputs = toy_inputs(n, buffers.device if on_device else "cpu")
        assert_equals_step(runner.run(n, inputs), step, inputs, runner.bucket_for(n), buffers)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sizes=st.lists(st.integers(1, 8), min_size=1, max_size=10))
def test_no_run_sees_an_earlier_one(sizes, step, make_runner):
    reads = {}

    def reading_step(batch):
        reads[batch.size] = batch
        return step(batch)

    runner = make_runner(reading_step)
    runner.capture([2, 5, 8], verify=False)
    for n in sizes:
        inputs = toy_inputs(n)
        out = runner.run(n, inputs)
        assert out["tokens"].tolist() == [2 * t + 1 for t in inputs["tokens"].tolist()]
        seen = reads[runner.bucket_for(n)]
        assert seen.n_active.tolist() == [n]
        assert seen.tokens.tolist()[n:] == [PAD_TOKEN] * (seen.size - n)


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


@pytest.mark.parametrize(
    "pack",
    [
        lambda t: t,
        lambda t: (t,),
        lambda t: (t, t + 1),
        lambda t: Pair(t, t + 1),
        lambda t: {"a": t, "b": t[:, None].expand(-1, 4)},
        lambda t: OrderedDict(b=t, a=t + 1),
        lambda t: defaultdict(list, a=t),
        lambda t: t[:, None].max(1),  # a named tuple of torch's own kind
    ],
)
def test_outputs_come_packed_as_the_step_packs_them(pack, make_runner, device):
    runner = make_runner(lambda batch: pack(batch.tokens * 2))
    runner.capture([1, 4])
    outputs = runner.run(3, toy_inputs(3) | {"tokens": [4, 5, 6]})
    expected = pack(torch.tensor([8, 10, 12], device=device))
    assert type(outputs) is type(expected)
    torch.testing.assert_close(outputs, expected, rtol=0, atol=0)


def test_outputs_are_overwritten_by_the_next_run_of_any_bucket(make_runner):
    runner = make_runner(lambda batch: batch.tokens + 0)
    runner.capture([2, 8])
    large = runner.run(8, toy_inputs(8) | {"tokens": range(8)})
    address = large.data_ptr()
    again = runner.run(8, toy_inputs(8) | {"tokens": range(10, 18)})
    assert again.data_ptr() == address
    assert large.tolist() == list(range(10, 18))


def test_changes_to_outputs_are_not_seen_in_the_next_run(step, make_runner):
    runner = make_runner(step)
    runner.capture([4])
    first = runner.run(3, toy_inputs(3))
    first["hidden"].unsqueeze_(0)
    del first["tokens"]
    second = runner.run(3, toy_inputs(3) | {"tokens": [1, 2, 3]})
    assert second["hidden"].shape == (3, 3)
    assert second["tokens"].tolist() == [3, 5, 7]


@pytest.mark.parametrize("earlier_runs", [0, 3])  # of which the last are repeated without Python
def test_changes_to_dicts_of_other_classes_are_not_seen_later(earlier_runs, make_runner):
    runner = make_runner(lambda batch: OrderedDict(tokens=batch.tokens + 1))
    runner.capture([4])
    for _ in range(earlier_runs):
        runner.run(1, ONE_ROW)
    runner.run(1, ONE_ROW).clear()
    assert runner.run(1, ONE_ROW)["tokens"].tolist() == [2]


@pytest.mark.parametrize(
    "change",
    [
        lambda output: output.t_(),
        lambda output: output.set_(torch.full_like(output, 7.0)),
        lambda output: setattr(output, "data", torch.full_like(output, 7.0)),
        lambda output: output.as_strided_((3, 3), (3, 1), 3),
    ],
    ids=["transposed", "set", "data", "moved"],
)
@pytest.mark.parametrize("earlier_runs", [0, 3])  # of which the last are repeated without Python
def test_what_a_caller_makes_of_its_outputs_is_not_seen_later(
    earlier_runs, change, step, make_runner
):
    runner = make_runner(step)
    runner.capture([6])
    inputs = toy_inputs(3)
    expected = runner.run(3, inputs)["hidden"].clone()
    for _ in range(earlier_runs):
        runner.run(3, inputs)
    change(runner.run(3, inputs)["hidden"])
    for _ in range(3):
        assert torch.equal(runner.run(3, inputs)["hidden"], expected)


def test_buckets_share_the_memory_of_outputs_on_cpu():
    runner = GraphRunner(lambda batch: batch.tokens + 0, StaticBuffers(SPECS, 8, "cpu"))
    runner.capture([2, 8])
    large = runner.run(8, toy_inputs(8) | {"tokens": range(8)})
    runner.run(2, toy_inputs(2) | {"tokens": [50, 51]})
    assert large.tolist() == [50, 51, 2, 3, 4, 5, 6, 7]


def test_outputs_whose_rows_depend_on_the_batch_size(make_runner, device):
    runner = make_runner(lambda batch: batch.tokens[:, None].expand(-1, batch.size) + 0)
    runner.capture([2, 4])
    assert runner.run(1, toy_inputs(1) | {"tokens": [5]}).tolist() == [[5, 5]]
    assert runner.run(3, toy_inputs(3) | {"tokens": [5, 6, 7]}).shape == (3, 4)


def test_all_sizes_are_warmed_then_captured_largest_first(step, make_runner):
    runner = make_runner(step)
    runner.capture([1, 2, 4], verify=False)
    assert step.calls == [4, 4, 2, 2, 1, 1, 4, 2, 1]


def test_warm_up_and_capture_see_padding_only(make_runner):
    seen = []

    def step(batch):
        if len(seen) < 2:  # the warm-up, which may read the device
            seen.append((batch.n_active.tolist(), batch.tokens.tolist()))
        return batch.tokens + 0

    make_runner(step).capture([2], verify=False)
    assert seen == [([0], [PAD_TOKEN] * 2)] * 2


def test_capture_pauses_garbage_collection_and_autograd(make_runner):
    seen = []

    def step(batch):
        seen.append((gc.isenabled(), torch.is_grad_enabled()))
        return batch.tokens + 0

    make_runner(step).capture([2], verify=False)
    assert seen == [(True, False), (True, False), (False, False)]
    assert gc.isenabled()


def test_step_runs_without_autograd(make_runner, device):
    weight = torch.ones(3, device=device, requires_grad=True)
    runner = make_runner(lambda batch: batch.hidden * weight)
    runner.capture([1])
    assert not runner.run(1, ONE_ROW).requires_grad


def test_capture_in_inference_mode_run_outside(step, make_runner):
    runner = make_runner(step)
    with torch.inference_mode():
        runner.capture([2])
    assert runner.run(1, ONE_ROW)["tokens"].tolist() == [3]


def test_lasting_state_of_a_step_is_not_made_in_inference_mode(make_runner, device):
    made = {}

    def step(batch):
        if "count" not in made:
            made["count"] = torch.zeros(1, dtype=torch.int64, device=device)
        made["count"].zero_().add_(1)
        return batch.tokens + made["count"]

    runner = make_runner(step)
    with torch.inference_mode():
        runner.capture([2])
    assert runner.run(1, ONE_ROW).tolist() == [2]
    made["count"].add_(1)


def test_lasting_state_made_in_a_run_in_inference_mode_on_cpu():
    made = {}

    def step(batch):
        if running:
            made.setdefault("count", torch.zeros(1, dtype=torch.int64)).zero_()
        return batch.tokens + 0

    running = False
    runner = GraphRunner(step, StaticBuffers(SPECS, 8, "cpu"))
    runner.capture([1])
    running = True
    with torch.inference_mode():
        runner.run(1, ONE_ROW)
    assert runner.run(1, ONE_ROW).tolist() == [1]


def test_run_in_and_out_of_inference_mode(step, make_runner):
    runner = make_runner(step)
    runner.capture([2])
    with torch.inference_mode():
        inside = runner.run(1, ONE_ROW)["tokens"]
    outside = runner.run(1, ONE_ROW)["tokens"]
    assert not inside.is_inference()
    assert inside.tolist() == outside.tolist() == [3]


@pytest.mark.parametrize("number", [np.int64, torch.tensor])
def test_n_is_any_integer_and_counted_as_one(number, step, make_runner):
    runner = make_runner(step)
    runner.capture([1, 4])
    assert runner.bucket_for(number(1)) == 1
    assert runner.run(number(2), toy_inputs(2))["tokens"].shape == (2,)
    stats = runner.stats()
    assert (stats.hits, stats.rows) == (1, 2)
    assert type(stats.rows) is int


def test_default_batch_sizes_and_lookup(step, make_runner):
    runner = make_runner(step)
    assert runner.batch_sizes == ()
    runner.capture()
    assert runner.batch_sizes == (1, 2, 4, 8)
    assert runner.max_batch_size == 8
    assert [runner.bucket_for(n) for n in range(1, 9)] == [1, 2, 4, 4, 8, 8, 8, 8]


def test_recapture_serves_a_step_whose_memory_moved(make_runner, device):
    weights = {"w": torch.full((3,), 2.0, device=device)}
    runner = make_runner(lambda batch: batch.hidden * weights["w"])
    runner.capture([1])
    weights["w"] = torch.full((3,), 5.0, device=device)
    runner.recapture()
    assert runner.run(1, ONE_ROW).tolist() == [[5.0, 10.0, 15.0]]


def test_weights_changed_in_place_are_seen(make_runner, device):
    weight = torch.full((3,), 2.0, device=device)
    runner = make_runner(lambda batch: batch.hidden * weight)
    runner.capture([1])
    weight.fill_(5.0)
    assert runner.run(1, ONE_ROW).tolist() == [[5.0, 10.0, 15.0]]


def test_capture_again_with_other_sizes(step, make_runner):
    runner = make_runner(step)
    runner.capture([1, 2])
    runner.run(1, ONE_ROW)
    runner.capture([4])
    assert runner.batch_sizes == (4,)
    assert runner.stats().hits == 0
    assert runner.run(1, ONE_ROW)["tokens"].tolist() == [3]


def test_stats_count_hits_rows_and_padding(step, make_runner):
    runner = make_runner(step)
    assert runner.stats().buckets == ()
    assert runner.stats().padding_waste == 0.0
    runner.capture([1, 4, 8])
    for n in (1, 2, 3, 4, 4):
        runner.run(n, toy_inputs(n))
    stats = runner.stats()
    assert [(b.batch_size, b.hits, b.rows, b.padded_rows) for b in stats.buckets] == [
        (1, 1, 1, 0),
        (4, 4, 13, 3),
        (8, 0, 0, 0),
    ]
    assert [b.padding_waste for b in stats.buckets] == [0.0, 3 / 16, 0.0]
    assert (stats.hits, stats.rows, stats.padded_rows) == (5, 14, 3)
    assert stats.padding_waste == 3 / 17
    with pytest.raises(AttributeError):
        stats.buckets = ()


def test_stats_while_another_thread_captures(make_runner):
    runner = make_runner(lambda batch: batch.tokens + 0, max_batch=64)
    sizes, failures, stop = range(1, 65), [], threading.Event()
    runner.capture(sizes, verify=False)

    def read():
        while not stop.is_set():
            try:
                count = len(runner.stats().buckets)
            except KeyError as error:
                failures.append(error)
            else:
                failures.extend([count] if count not in (0, 64) else [])

    thread = threading.Thread(target=read)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    thread.start()
    try:
        for _ in range(10):
            runner.recapture(verify=False)
    finally:
        sys.setswitchinterval(interval)
        stop.set()
        thread.join(timeout=60)
    assert failures == []


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stream", "progress", "shown"),
    [(Terminal(), True, True), (Terminal(), False, False), (io.StringIO(), True, False)],
)
def test_progress_is_shown_on_a_terminal_only(
    stream, progress, shown, step, make_runner, monkeypatch
):
    monkeypatch.setattr("sys.stderr", stream)
    make_runner(step).capture([1, 4], progress=progress)
    assert ("Capturing graphs: bs = 4" in stream.getvalue()) == shown
    assert shown or stream.getvalue() == ""


def test_progress_is_not_shown_where_there_is_no_standard_error(step, make_runner, monkeypatch):
    monkeypatch.setattr("sys.stderr", None)
    runner = make_runner(step)
    runner.capture([1, 4])
    assert runner.batch_sizes == (1, 4)


def test_a_group_of_one_waits_for_nobody(step, make_runner):
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        runner = make_runner(step, group=torch.distributed.group.WORLD)
        runner.capture([1])
        assert runner.run(1, ONE_ROW)["tokens"].tolist() == [3]
    finally:
        torch.distributed.destroy_process_group()


def test_another_default_device_changes_nothing(device):
    specs = {
        "tokens": BufferSpec((), torch.int64, 0),
        "position": BufferSpec((), torch.int32, 0),
        "slot": BufferSpec((), torch.int64, -1),
        "table": BufferSpec((4,), torch.int64, -1),
        "scale": BufferSpec((), torch.float8_e5m2, math.inf),
    }
    rules = BurstRules(
        {"tokens": Feed("tokens"), "position": Add(), "slot": Slot("table", "position", 4)}
    )

    def step(batch):
        return {"tokens": batch.tokens + batch.slot}

    inputs = {
        "tokens": [1, 2],
        "position": [0, 0],
        "slot": [0, 4],
        "table": [[0, 1, 2, 3], [1, 5, 6, 7]],
        "scale": [0.5, 1.0],
    }
    with torch.device("meta"):
        _has_infinity.cache_clear()
        buffers = StaticBuffers(specs, 2, device)
        with GraphRunner(step, buffers, burst=rules) as runner:
            runner.capture()
            assert runner.run(2, inputs)["tokens"].tolist() == [1, 6]
            assert list(runner.burst(2, inputs, 3)) == [[1, 6], [2, 11], [4, 17]]
