"""What only a GPU can show: streams, the memory pool, pinned staging and failed captures."""

import threading

import pytest
import torch
from graphs_sins import copy_unpinned, leave_a_fork, read_device, wait_for_the_device
from graphs_toys import SPECS, ToyStep, toy_inputs

from ostinato.graphs import (
    BufferSpec,
    BusyError,
    CaptureError,
    GraphRunner,
    StaticBuffers,
    VerificationError,
)

pytestmark = pytest.mark.gpu

CUDA = "cuda"
LONG = 200_000_000  # clock cycles, about a tenth of a second


@pytest.fixture
def device():
    """Only CUDA: everything here runs under `make test-gpu` alone."""
    return torch.device(CUDA)


@pytest.fixture
def layers():
    """Two bf16 layers wide enough for cuBLAS to choose kernels by batch size."""
    return [torch.randn(512, 512, dtype=torch.bfloat16, device=CUDA) / 23 for _ in range(2)]


def matmul_runner(layers, max_batch=64, **options):
    def draw(generator, shape):
        return torch.randn(shape, generator=generator)

    def step(batch):
        hidden = torch.relu(batch.x @ layers[0]) @ layers[1]
        return {"hidden": hidden, "best": hidden.argmax(-1)}

    specs = {"x": BufferSpec((512,), torch.bfloat16, 0.0, draw)}
    buffers = StaticBuffers(specs, max_batch, CUDA)
    return step, buffers, GraphRunner(step, buffers, **options)


def test_replays_of_all_buckets_equal_eager_bit_for_bit(layers):
    step, buffers, runner = matmul_runner(layers)
    report = runner.capture()
    assert [graph.verdict for graph in report.graphs] == ["bit-equal"] * 7
    for n in range(1, 65):
        x = torch.randn(n, 512, dtype=torch.bfloat16)
        bucket = runner.bucket_for(n)
        outputs = {name: rows.clone() for name, rows in runner.run(n, {"x": x}).items()}
        buffers.stage({"x": x}, n, bucket)
        expected = step(buffers.view(bucket))
        for name, rows in outputs.items():
            assert torch.equal(rows, expected[name][:n])
    runner.close()


def test_run_waits_for_the_callers_stream_and_the_caller_for_it(step, make_runner):
    runner = make_runner(step)
    runner.capture([4])
    caller = torch.cuda.Stream()
    tokens = [torch.arange(4, device=CUDA) + 10 * i for i in range(3)]
    hidden = torch.zeros(4, 3, device=CUDA)
    late = torch.zeros(4, dtype=torch.int64, device=CUDA)
    results = []
    torch.cuda.synchronize()
    with torch.cuda.stream(caller):
        for values in tokens:
            torch.cuda._sleep(LONG)
            late.copy_(values)
            out = runner.run(4, {"tokens": late, "hidden": hidden})
            torch.cuda._sleep(LONG)  # a slow consumer, whom the next run must not overtake
            results.append(out["tokens"] + 0)
    caller.synchronize()
    for values, result in zip(tokens, results, strict=True):
        assert torch.equal(result, 2 * values + 1)


def test_freed_device_inputs_are_not_reused_before_they_are_read(step, make_runner):
    runner = make_runner(step)
    runner.capture([4])
    results = []
    for i in range(3):
        torch.cuda._sleep(LONG)
        inputs = toy_inputs(4, CUDA) | {"tokens": torch.full((4,), i, device=CUDA)}
        out = runner.run(4, inputs)
        del inputs
        torch.full((4,), 99, device=CUDA)  # may take the freed memory at once
        results.append(out["tokens"].clone())
    assert [result.tolist() for result in results] == [[2 * i + 1] * 4 for i in range(3)]


def test_pinned_memory_is_not_written_while_it_is_being_copied(step, make_runner):
    runner = make_runner(step)
    runner.capture([4])
    results = []
    for i in range(4):
        torch.cuda._sleep(LONG)  # keeps the copies of this run from starting
        out = runner.run(4, toy_inputs(4) | {"tokens": [i] * 4})
        results.append(out["tokens"].clone())
    assert [result.tolist() for result in results] == [[2 * i + 1] * 4 for i in range(4)]


def test_run_does_not_wait_for_the_device(step, make_runner):
    runner = make_runner(step)
    runner.capture([4])
    inputs = toy_inputs(4, CUDA)
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG)
    runner.run(4, inputs)
    assert not torch.cuda.current_stream().query()


def test_run_allocates_no_device_memory(step, make_runner):
    runner = make_runner(step)
    runner.capture([4])
    host, device = toy_inputs(3), toy_inputs(3, CUDA)

    def allocations():
        return torch.cuda.memory_stats()["allocation.all.allocated"]

    before = allocations()
    for inputs in (host, device):
        runner.run(3, inputs)
    assert allocations() == before


def test_all_buckets_share_one_pool(layers):
    pool = torch.cuda.graph_pool_handle()
    _, _, runner = matmul_runner(layers, pool=pool)
    report = runner.capture([1, 16, 64])

    def segments():
        return [
            segment
            for segment in torch.cuda.memory_snapshot()
            if tuple(segment["segment_pool_id"]) == tuple(pool)
        ]

    reserved = sum(segment["total_size"] for segment in segments())
    assert reserved > 0
    assert sum(graph.pool_mib for graph in report.graphs) == reserved / 2**20
    for n in (1, 16, 64):
        out = runner.run(n, {"x": torch.zeros(n, 512, dtype=torch.bfloat16)})
        address = out["hidden"].data_ptr()
        assert any(s["address"] <= address < s["address"] + s["total_size"] for s in segments())
    del out
    runner.close()
    assert segments() == []


def test_recapture_and_close_give_memory_back(layers):
    _, _, runner = matmul_runner(layers)
    runner.capture([1, 64])
    torch.cuda.synchronize()
    reserved = torch.cuda.memory_reserved()
    for _ in range(3):
        runner.recapture()
    assert torch.cuda.memory_reserved() <= reserved
    runner.close()
    assert torch.cuda.memory_reserved() < reserved


def test_recapture_into_a_pool_of_the_callers(layers):
    _, _, runner = matmul_runner(layers, pool=torch.cuda.graph_pool_handle())
    for _ in range(2):
        runner.capture([1, 64])
    assert runner.run(1, {"x": torch.zeros(1, 512, dtype=torch.bfloat16)})["best"].shape == (1,)
    runner.close()


def assert_healthy(runner):
    """Check what a failed capture is known to leave broken, then capture and run."""
    assert not torch.cuda.is_current_stream_capturing()
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    torch.cuda.synchronize()
    torch.rand(3, device=CUDA)
    torch.empty(1 << 20, device=CUDA).fill_(1)
    torch.empty(1 << 20, pin_memory=True)
    runner.capture([2, 4])
    assert runner.run(3, toy_inputs(3) | {"tokens": [1, 2, 3]})["tokens"].tolist() == [3, 5, 7]
    torch.rand(3, device=CUDA)


def raise_in_python(batch):
    raise ValueError("plain")


def raise_on_a_fork(batch):
    leave_a_fork(batch)
    raise ValueError("forked")


def swallow_a_failure(batch):
    try:
        batch.tokens.sum().item()
    except RuntimeError:
        return


def draw_then_read(batch):
    torch.rand(4, device=CUDA)
    batch.tokens.sum().item()


@pytest.mark.parametrize("own_pool", [False, True])
@pytest.mark.parametrize("first_fails", [True, False])
@pytest.mark.parametrize(
    "sin",
    [
        read_device,
        copy_unpinned,
        wait_for_the_device,
        leave_a_fork,
        raise_in_python,
        raise_on_a_fork,
        swallow_a_failure,
        draw_then_read,
    ],
)
def test_after_a_failed_capture_capturing_works(sin, first_fails, own_pool, make_runner):
    toy, repent = ToyStep(), False

    def step(batch):
        failing = first_fails or batch.size == 2
        if torch.cuda.is_current_stream_capturing() and failing and not repent:
            sin(batch)
        return toy(batch)

    options = {"pool": torch.cuda.graph_pool_handle()} if own_pool else {}
    runner = make_runner(step, **options)
    for _ in range(2):
        with pytest.raises(CaptureError, match="could not capture batch size"):
            runner.capture([2, 4])
    repent = True
    assert_healthy(runner)


def test_another_thread_may_use_the_device_during_a_capture(make_runner):
    toy, capturing, done = ToyStep(), threading.Event(), threading.Event()

    def allocate():
        capturing.wait(timeout=60)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            torch.empty(1 << 24, device=CUDA).fill_(1)
        stream.synchronize()
        done.set()

    def step(batch):
        if torch.cuda.is_current_stream_capturing():
            capturing.set()
            done.wait(timeout=60)
        return toy(batch)

    thread = threading.Thread(target=allocate)
    thread.start()
    try:
        assert_healthy(make_runner(step))
    finally:
        capturing.set()
        thread.join(timeout=60)
    assert done.is_set()


@pytest.mark.parametrize("known", [False, True])
def test_run_while_the_callers_stream_is_captured_is_refused(known, step, make_runner):
    runner = make_runner(step)
    runner.capture([4])
    inputs = toy_inputs(4, CUDA)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2 * known):  # a graph's first replay tells whether it has random numbers
            runner.run(4, inputs)
    with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream):
        x = torch.zeros(4, device=CUDA) + 1
        for call in (lambda: runner.run(4, inputs), runner.recapture):
            with pytest.raises(BusyError, match="current stream is being captured"):
                call()
    del x
    runner.capture([4])
    assert runner.run(4, inputs)["tokens"].shape == (4,)


def test_a_capture_on_another_device_is_refused(step):
    last = torch.device(CUDA, torch.cuda.device_count() - 1)  # the current one if there is one only
    with GraphRunner(step, StaticBuffers(SPECS, 8, last)) as runner:
        runner.capture([4])
        inputs = toy_inputs(4, last)
        with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=torch.cuda.Stream(last)):
            x = torch.zeros(4, device=last) + 1
            with (
                torch.cuda.device(0),
                pytest.raises(BusyError, match="current stream is being captured"),
            ):
                runner.run(4, inputs)
        del x
        assert runner.run(4, inputs)["tokens"].shape == (4,)
    assert torch.cuda.current_device() == 0


def test_close_waits_for_readers_of_outputs(step, make_runner):
    runner = make_runner(step)
    runner.capture([4])
    out = runner.run(4, toy_inputs(4))["tokens"]  # kept: freeing its memory would wait by itself
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda._sleep(LONG)
    out + 0
    runner.close()
    assert torch.cuda.current_stream().query()


def test_a_stream_of_the_callers(step):
    stream = torch.cuda.Stream()
    seen = []

    def noting_step(batch):
        seen.append(torch.cuda.current_stream() == stream)
        return step(batch)

    with GraphRunner(noting_step, StaticBuffers(SPECS, 8, CUDA), stream=stream) as runner:
        runner.capture([4])
        with torch.cuda.stream(stream):
            out = runner.run(4, toy_inputs(4) | {"tokens": range(4)})
            assert out["tokens"].tolist() == [1, 3, 5, 7]
    assert all(seen)


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"pool": 3}, TypeError, "pool: got 3"),
        ({"pool": (1, 2, 3)}, TypeError, r"pool: got \(1, 2, 3\)"),
        ({"stream": 7}, TypeError, "stream: got int"),
    ],
)
def test_bad_pools_and_streams(options, error, match, step):
    with pytest.raises(error, match=match):
        GraphRunner(step, StaticBuffers(SPECS, 8, CUDA), **options)


def test_a_pool_that_is_used_on_another_stream_is_refused(step):
    pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
    with GraphRunner(step, StaticBuffers(SPECS, 8, CUDA), pool=pool, stream=stream):
        with pytest.raises(ValueError, match=r"pool: got .*, which another runner uses on another"):
            GraphRunner(step, StaticBuffers(SPECS, 8, CUDA), pool=pool)
        GraphRunner(step, StaticBuffers(SPECS, 8, CUDA), pool=pool, stream=stream)


def test_the_default_stream_is_refused(step):
    with pytest.raises(ValueError, match="stream: got the default stream"):
        GraphRunner(step, StaticBuffers(SPECS, 8, CUDA), stream=torch.cuda.default_stream())


def test_step_that_returns_host_memory(make_runner):
    runner = make_runner(lambda batch: batch.tokens.cpu())
    with pytest.raises(CaptureError, match="step: output is on cpu, expected cuda:0"):
        runner.capture([4])


def test_an_output_that_is_the_steps_own_memory_is_not_poisoned(make_runner):
    scale = torch.full((4, 3), 2.0, device=CUDA)
    runner = make_runner(lambda batch: {"scale": scale, "x": batch.hidden * scale[: batch.size]})
    runner.capture([4])
    assert (scale == 2.0).all()


def test_a_step_that_does_something_else_under_capture_is_found(make_runner):
    def step(batch):
        offset = 0 if torch.cuda.is_current_stream_capturing() else 1
        return batch.tokens + offset

    with pytest.raises(VerificationError, match="the replay differs from the step: output in 1 of"):
        make_runner(step).capture([1])


def test_work_skipped_in_the_capture_is_found(make_runner):
    scratch = torch.zeros(4, 3, device=CUDA)

    def step(batch):
        if not torch.cuda.is_current_stream_capturing():
            torch.mul(batch.hidden, 2, out=scratch[: batch.size])
        return scratch[: batch.size] + 1

    with pytest.raises(VerificationError, match="batch size 4 with 4 real rows: the replay"):
        make_runner(step).capture([4])
