"""Bursts: the tokens of stepping, rows that end, and what is refused; on a GPU in one launch."""

import ctypes
import threading

import pytest
import torch
from graphs_counting import (
    COLUMNS,
    PAD_PAGE,
    PAGE_SIZE,
    RULES,
    SPECS,
    VOCAB,
    CountingStep,
    first_inputs,
    stepped,
)
from graphs_fakes import RecordingBackend
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ostinato.graphs import (
    Add,
    BufferSpec,
    BurstError,
    BurstRules,
    BusyError,
    ClosedError,
    Feed,
    GraphRunner,
    Misses,
    NotCapturedError,
    Slot,
    StaticBuffers,
)
from ostinato.graphs.inspect.nodes import GraphNodes, Node, Word
from ostinato.graphs.loop.cuda import check_body


@pytest.fixture
def counting(device):
    return CountingStep(device)


@pytest.fixture
def runner(counting, device):
    buffers = StaticBuffers(SPECS, 4, device)
    with GraphRunner(counting, buffers, burst=RULES) as runner:
        runner.capture([1, 4])
        yield runner


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_tokens_are_those_of_stepping(n, runner, counting):
    inputs = first_inputs(n)
    burst = runner.burst(n, inputs, 20)
    steps = list(burst)
    assert len(steps) == 20
    assert burst.tokens == [[step[row] for step in steps] for row in range(n)]
    assert burst.reasons == ["limit"] * n
    counting.state.zero_()
    assert burst.tokens == stepped(runner, inputs, [20] * n, [[]] * n)


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_rows_end_by_themselves_and_change_nothing_for_others(data, runner, counting):
    n = data.draw(st.integers(1, 4))
    limits = data.draw(st.lists(st.integers(1, 20), min_size=n, max_size=n))
    token = st.integers(0, VOCAB - 1)
    stops = data.draw(st.lists(st.lists(token, max_size=3), min_size=n, max_size=n))
    inputs = first_inputs(n)
    counting.state.zero_()
    expected = stepped(runner, inputs, limits, stops)
    counting.state.zero_()
    with runner.burst(n, inputs, 20, limits=limits, stops=stops) as burst:
        steps = list(burst)
    assert burst.tokens == expected
    assert len(steps) == max(map(len, expected))
    for row, tokens in enumerate(expected):
        assert [step[row] for step in steps[len(tokens) :]] == [None] * (len(steps) - len(tokens))
        assert burst.reasons[row] == ("stop" if tokens[-1] in stops[row] else "limit")


def test_a_row_that_has_ended_is_padding(counting, device):
    seen = []

    def step(batch):
        seen.append([batch.slots.tolist(), batch.pages.tolist()] if device.type == "cpu" else [])
        return counting(batch)

    buffers = StaticBuffers(SPECS, 2, device)
    with GraphRunner(step, buffers, burst=RULES) as runner:
        runner.capture([2], verify=False)
        runner.burst(2, first_inputs(2), 6, limits=[2, 6]).close()
        list(runner.burst(2, first_inputs(2), 6, limits=[2, 6]))
        buffers = buffers.view(2)
        assert buffers.slots.tolist() == [-1, -1]
        assert buffers.pages.tolist() == [[PAD_PAGE] * COLUMNS] * 2
        assert buffers.mixed.tolist() == [[0.5, 0.5]] * 2
    if device.type == "cpu":
        assert [slots[0] for slots, _ in seen[-4:]] == [-1] * 4
        assert all(slots[1] >= 0 for slots, _ in seen[-4:])


def test_the_same_stop_tokens_for_every_row(runner):
    inputs = first_inputs(3)
    [tokens] = runner.burst(3, inputs, 1)
    burst = runner.burst(3, inputs, 9, stops=tokens)
    assert list(burst) == [tokens]
    assert burst.reasons == ["stop"] * 3


def test_a_row_ends_at_pages_the_host_cannot_see(runner, device):
    inputs = first_inputs(2, pages=2, start=PAGE_SIZE)  # room for 4 tokens
    if device.type == "cuda":
        placed = {name: value.to(device) for name, value in inputs.items()}
        burst = runner.burst(2, placed, 12)
        list(burst)
        assert burst.reasons == ["full"] * 2
        assert list(map(len, burst.tokens)) == [PAGE_SIZE] * 2


def test_a_cancelled_burst_without_a_gpu_takes_no_further_step():
    counting = CountingStep("cpu")
    with GraphRunner(counting, StaticBuffers(SPECS, 2, "cpu"), burst=RULES) as runner:
        runner.capture([2], verify=False)
        burst = runner.burst(2, first_inputs(2), 20, limits=[1, 20])
        next(burst)
        calls = counting.calls
        burst.close()
        assert counting.calls == calls
        assert (burst.steps, burst.reasons) == (1, ["limit", "cancelled"])


def test_cancelling_keeps_what_was_taken(runner):
    burst = runner.burst(2, first_inputs(2), 20)
    first = next(burst)
    burst.cancel()
    rest = list(burst)
    assert burst.steps == 1 + len(rest) <= 20
    assert [row[0] for row in burst.tokens] == first
    assert burst.steps == 20 or burst.reasons == ["cancelled"] * 2
    burst.cancel()  # of what has ended: nothing
    runner.run(2, first_inputs(2))


@pytest.mark.parametrize("how", ["close", "drop", "leave"])
def test_an_abandoned_burst_frees_the_runner(how, runner):
    burst = runner.burst(2, first_inputs(2), 20)
    next(burst)
    with pytest.raises(BusyError, match="burst"):
        runner.run(2, first_inputs(2))
    with pytest.raises(BusyError, match="burst"):
        runner.burst(2, first_inputs(2), 3)
    if how == "close":
        burst.close()
        burst.close()
    elif how == "leave":
        with burst:
            pass
    del burst
    runner.run(2, first_inputs(2))


def test_closing_the_runner_ends_its_burst(counting, device):
    runner = GraphRunner(counting, StaticBuffers(SPECS, 2, device), burst=RULES)
    runner.capture([2])
    burst = runner.burst(2, first_inputs(2), 20)
    first = next(burst)
    runner.close()
    assert [row[0] for row in burst.tokens] == first
    assert list(burst) == []
    with pytest.raises(ClosedError):
        runner.burst(2, first_inputs(2), 20)


def test_closing_the_runner_waits_for_who_reads_the_burst(counting, device):
    runner = GraphRunner(counting, StaticBuffers(SPECS, 2, device), burst=RULES)
    runner.capture([2])
    burst = runner.burst(2, first_inputs(2), 20)
    reads, may_go_on = threading.Event(), threading.Event()

    def read():
        next(burst)
        reads.set()
        may_go_on.wait(30)
        list(burst)

    thread = threading.Thread(target=read)
    thread.start()
    reads.wait(30)
    threading.Timer(0.2, may_go_on.set).start()
    runner.close(timeout_s=30)
    thread.join()
    assert 1 <= burst.steps <= 20


def test_a_burst_takes_the_smallest_graph_or_captures_it(counting, device):
    with GraphRunner(counting, StaticBuffers(SPECS, 4, device), burst=RULES) as runner:
        runner.capture([1], misses=Misses("capture", [1, 2, 4]), verify=False)
        inputs = first_inputs(2)
        burst = runner.burst(2, inputs, 6)
        list(burst)
        assert runner.batch_sizes == (1, 2)
        assert burst.tokens == stepped(runner, inputs, [6] * 2, [[]] * 2)
        runner.capture([1], misses=Misses("eager"), verify=False)
        with pytest.raises(BurstError, match="no graph of batch size 4"):
            runner.burst(3, first_inputs(3), 6)
        assert len(list(runner.burst(1, first_inputs(1), 6))) == 6


def test_a_late_captured_burst_reads_views_of_last_outputs(device):
    specs = {"x": BufferSpec((), torch.int64, 0)}
    rules = BurstRules({"x": Feed(None)}, None)
    buffers = StaticBuffers(specs, 4, device)
    with GraphRunner(lambda batch: 2 * batch.x + 1, buffers, burst=rules) as runner:
        runner.capture([4], misses=Misses("capture", [1, 2, 4]), verify=False)
        outputs = runner.run(3, {"x": [1, 2, 3]})
        assert list(runner.burst(2, {"x": outputs[:2]}, 2)) == [[7, 11], [15, 23]]
        assert runner.stats().lazy_captures == 1


def test_a_burst_in_the_callers_stream_follows_its_work(runner, device):
    if device.type == "cuda":
        stream = torch.cuda.Stream()
        inputs = first_inputs(2)
        placed = {name: torch.zeros_like(value, device=device) for name, value in inputs.items()}
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(50_000_000)
            for name, value in inputs.items():
                placed[name].copy_(value.pin_memory(), non_blocking=True)
            late = runner.burst(2, placed, 6)
            list(late)
        assert late.tokens == stepped(runner, inputs, [6] * 2, [[]] * 2)


def test_a_step_that_calls_the_host_is_refused_for_bursts(counting, device):
    if device.type == "cuda":
        libcuda = ctypes.CDLL("libcuda.so.1")
        callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda data: None)

        def step(batch):
            if torch.cuda.is_current_stream_capturing():  # the function is never called
                stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
                assert libcuda.cuLaunchHostFunc(stream, callback, None) == 0
            return counting(batch)

        with GraphRunner(step, StaticBuffers(SPECS, 2, device), burst=RULES) as runner:
            with pytest.raises(BurstError, match=r"node \d+, host"):
                runner.capture([2], verify=False)
            assert runner.batch_sizes == ()


def test_a_burst_may_be_read_in_another_thread(runner):
    burst = runner.burst(2, first_inputs(2), 8)
    read = []
    thread = threading.Thread(target=lambda: read.extend(burst))
    thread.start()
    thread.join()
    assert len(read) == 8
    runner.run(2, first_inputs(2))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, "steps: got 0"),
        ({"steps": -3}, "steps: got -3"),
        ({"steps": 25}, "max_steps=24"),
        ({"limits": [1]}, "limits: got 1, expected one for each of 2"),
        ({"limits": [1, 0]}, "limits: got 0"),
        ({"stops": [1, 2, 3, 4]}, "max_stops=3"),
        ({"stops": [[1], [2], [3]]}, "stops: got 3 entries"),
        ({"stops": [[1], 2]}, "stops: got 2 entries"),
        ({"stops": [1 << 63]}, "expected a number of 64 bits"),
        ({"n": 5}, "n: got 5"),
        ({"n": 0}, "n: got 0"),
    ],
)
def test_bad_arguments_are_named_before_anything_is_launched(options, message, runner, counting):
    calls = counting.calls
    arguments = {"n": 2, "inputs": first_inputs(2), "steps": 5} | options
    with pytest.raises(ValueError, match=message):
        runner.burst(**arguments)
    assert counting.calls == calls
    runner.run(2, first_inputs(2))


@pytest.mark.parametrize(
    "options",
    [
        {"steps": 2.5},
        {"limits": [1, "x"]},
        {"limits": 5},
        {"stops": 5},
        {"stops": None},
        {"stops": [1.5]},
        {"stops": torch.tensor([[23], [13]])},
        {"stops": torch.tensor([True])},
        {"n": torch.tensor([2])},
        {"inputs": [1]},
    ],
)
def test_arguments_of_the_wrong_kind_are_named(options, runner):
    with pytest.raises(TypeError, match=f"^{next(iter(options))}: got"):
        runner.burst(**({"n": 2, "inputs": first_inputs(2), "steps": 5} | options))
    runner.run(2, first_inputs(2))


def test_more_steps_than_the_pages_hold_are_refused(runner):
    inputs = first_inputs(2, pages=2, start=3)
    with pytest.raises(ValueError, match=r"row 0 has pages for 5 steps, expected its 6"):
        runner.burst(2, inputs, 6)
    assert len(list(runner.burst(2, inputs, 5))) == 5
    with pytest.raises(ValueError, match="row 1 has pages for 5 steps, expected its 9"):
        runner.burst(2, inputs, 9, limits=[2, 9])
    far = first_inputs(1, start=COLUMNS * PAGE_SIZE - 2)
    with pytest.raises(ValueError, match="row 0 has pages for 2 steps"):
        runner.burst(1, far, 3)


def test_a_runner_without_rules_or_graphs_says_so(counting, device):
    with GraphRunner(counting, StaticBuffers(SPECS, 2, device)) as runner:
        with pytest.raises(NotCapturedError):
            runner.burst(1, first_inputs(1), 2)
        runner.capture([2], verify=False)
        with pytest.raises(BurstError, match="no rules"):
            runner.burst(1, first_inputs(1), 2)


def rules(record="tokens", **changed):
    return BurstRules({**RULES.next, **changed}, record)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (rules(absent=Add(1)), "no such buffer"),
        (rules(scale=Add(1)), "'scale' has"),
        (rules(slots=Slot("nowhere", "positions", 4)), "no buffer 'nowhere'"),
        (rules(slots=Slot("scale", "positions", 4)), "one row of columns"),
        (rules(slots=Slot("pages", "scale", 4)), "'scale' has"),
        (rules(slots=Slot("pages", "slots", 4)), "slots themselves"),
    ],
)
def test_rules_that_do_not_fit_the_buffers(wrong, message, counting):
    with pytest.raises(ValueError, match=message):
        GraphRunner(counting, StaticBuffers(SPECS, 2, "cpu"), burst=wrong)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (rules("absent"), "no output"),
        (rules("mixed"), "record: got torch.float32"),
        (rules(tokens=Feed("mixed")), "expected the buffer's"),
        (rules(tokens=Feed(0)), "no output"),
    ],
)
def test_rules_that_do_not_fit_the_outputs_end_the_capture(wrong, message, counting, device):
    with GraphRunner(counting, StaticBuffers(SPECS, 2, device), burst=wrong) as runner:
        with pytest.raises(ValueError, match=message):
            runner.capture([2], verify=False)
        with pytest.raises(NotCapturedError):
            runner.run(1, first_inputs(1))


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        (([],), TypeError),
        (({"tokens": "tokens"},), TypeError),
        (({"tokens": Add(1.5)},), TypeError),
        (({"slots": Slot("pages", "positions", 0)},), ValueError),
    ],
)
def test_rules_are_checked_when_they_are_made(arguments, kind):
    with pytest.raises(kind):
        BurstRules(*arguments)
    with pytest.raises(ValueError, match="max_steps"):
        BurstRules({}, max_steps=0)
    with pytest.raises(TypeError, match="burst"):
        GraphRunner(lambda batch: batch.tokens, StaticBuffers(SPECS, 1, "cpu"), burst={})


def test_a_step_of_one_tensor_or_a_tuple_feeds_itself(device):
    specs = {"x": BufferSpec((), torch.int32, 0)}
    for pack, key in ((lambda x: x, None), (lambda x: (x + 5, x), 1)):
        chosen = BurstRules({"x": Feed(key)}, key)
        with GraphRunner(
            lambda batch, pack=pack: pack(2 * batch.x),
            StaticBuffers(specs, 2, device),
            burst=chosen,
        ) as runner:
            runner.capture([2])
            burst = runner.burst(1, {"x": [3]}, 5)
            assert [token for [token] in burst] == [6, 12, 24, 48, 96]


def test_what_the_step_raises_ends_the_burst():
    counting = CountingStep("cpu")

    def step(batch):
        if counting.calls >= 8:
            raise OverflowError("too much")
        return counting(batch)

    with GraphRunner(step, StaticBuffers(SPECS, 2, "cpu"), burst=RULES) as runner:
        runner.capture([2], verify=False)
        burst = runner.burst(2, first_inputs(2), 20)
        with pytest.raises(OverflowError, match="too much"):
            list(burst)
        assert list(burst) == []
        counting.calls = 0
        runner.run(2, first_inputs(2))


def test_stop_iteration_in_a_step_does_not_end_the_burst():
    def step(batch):
        if armed:
            next(iter(()))
        return {"x": batch.x + 1}

    armed = False
    rules = BurstRules({"x": Feed("x")}, "x")
    buffers = StaticBuffers({"x": BufferSpec((), torch.int64, 0)}, 2, "cpu")
    with GraphRunner(step, buffers, burst=rules) as runner:
        runner.capture([2])
        burst = runner.burst(1, {"x": [1]}, 4)
        assert next(burst) == [2]
        armed = True
        with pytest.raises(BurstError, match="the step raised StopIteration") as caught:
            list(burst)
        assert isinstance(caught.value.__cause__, StopIteration)
        armed = False
        assert list(burst) == []
        assert runner.run(1, {"x": [1]})["x"].tolist() == [2]


KERNEL = Node("kernel", "good")
PAGEABLE = Node("memcpy", words=[Word(4096, "source", True), Word(8192, "destination", True)])


@pytest.mark.parametrize(
    ("node", "message"),
    [
        (Node("host"), "node 1, host"),
        (Node("allocation"), "node 1, allocation"),
        (Node("event record"), "node 1, event record"),
        (PAGEABLE, "node 1, memcpy: its source is pageable"),
    ],
)
def test_a_step_that_no_loop_can_hold_is_refused_by_name(node, message):
    with pytest.raises(BurstError, match=message):
        check_body(GraphNodes([KERNEL, node], []), lambda address: address == 4096)
    check_body(GraphNodes([KERNEL, PAGEABLE], []), lambda address: False)


def test_what_the_backend_refuses_ends_the_capture():
    class Refusing(RecordingBackend):
        def loop(self, *arguments):
            raise BurstError("node 3, host")

    runner = GraphRunner(CountingStep("cpu"), StaticBuffers(SPECS, 2, "cpu"), burst=RULES)
    runner._bursts._backend = Refusing(GraphNodes([], []))
    with pytest.raises(BurstError, match="node 3"):
        runner.capture([1, 2], verify=False, audit="off")
    assert runner.batch_sizes == ()
