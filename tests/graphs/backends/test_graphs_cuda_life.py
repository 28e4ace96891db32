"""What only a GPU can show of runs on any stream, of sleeping, and of graphs that come and go."""

import ctypes
import sys
import time

import pytest
import torch
from graphs_toys import SPECS, ToyStep, toy_inputs

from ostinato.graphs import BufferSpec, CaptureError, GraphRunner, Key, Misses, StaticBuffers

pytestmark = pytest.mark.gpu

CUDA = "cuda"
LONG = 200_000_000  # clock cycles, about a tenth of a second
MIB = 2**20


@pytest.fixture
def device():
    """Only CUDA: everything here runs under `make test-gpu` alone."""
    return torch.device(CUDA)


def run_with(runner, value):
    return runner.run(4, toy_inputs(4, CUDA) | {"tokens": torch.full((4,), value, device=CUDA)})


def test_a_run_on_another_stream_waits_for_readers_on_the_last(step, make_runner):
    runner = make_runner(step)
    runner.capture([4])
    inputs = [toy_inputs(4, CUDA) | {"tokens": torch.full((4,), i, device=CUDA)} for i in range(6)]
    streams, results = [torch.cuda.Stream() for _ in range(3)], []
    torch.cuda.synchronize()
    for i in range(6):
        with torch.cuda.stream(streams[i % 3]):
            out = runner.run(4, inputs[i])
            torch.cuda._sleep(LONG)  # a slow reader, whom the run on the next stream must wait for
            results.append(out["tokens"] + 0)
    torch.cuda.synchronize()
    assert [result.tolist() for result in results] == [[2 * i + 1] * 4 for i in range(6)]


def test_a_run_is_given_to_the_callers_stream_alone(step, make_runner):
    runner = make_runner(step)
    runner.capture([4])
    caller = torch.cuda.Stream()
    inputs = toy_inputs(4, CUDA)
    torch.cuda.synchronize()
    with torch.cuda.stream(caller):
        torch.cuda._sleep(LONG)
        runner.run(4, inputs)
    assert not caller.query()
    assert torch.cuda.current_stream().query()
    assert runner._backend._stream.query()


def test_streams_of_another_library_may_be_gone_at_the_next_run(step, make_runner):
    cuda = ctypes.CDLL("libcuda.so.1")
    runner = make_runner(step)
    runner.capture([4])
    for i in range(3):
        handle = ctypes.c_void_p()
        assert cuda.cuStreamCreate(ctypes.byref(handle), 1) == 0
        foreign = torch.cuda.ExternalStream(handle.value)
        with torch.cuda.stream(foreign):
            torch.cuda._sleep(LONG // 10)
            out = run_with(runner, i)["tokens"].clone()
        foreign.synchronize()
        assert out.tolist() == [2 * i + 1] * 4
        del foreign
        assert cuda.cuStreamDestroy_v2(handle) == 0
    assert run_with(runner, 9)["tokens"].tolist() == [19] * 4


def test_a_refused_run_on_a_stream_that_is_then_gone(step, make_runner):
    cuda = ctypes.CDLL("libcuda.so.1")
    runner = make_runner(step)
    runner.capture([4])
    handle = ctypes.c_void_p()
    assert cuda.cuStreamCreate(ctypes.byref(handle), 1) == 0
    foreign = torch.cuda.ExternalStream(handle.value)
    with torch.cuda.stream(foreign), pytest.raises(TypeError, match="tokens"):
        runner.run(4, toy_inputs(4) | {"tokens": torch.zeros(4)})
    del foreign
    assert cuda.cuStreamDestroy_v2(handle) == 0
    assert run_with(runner, 9)["tokens"].tolist() == [19] * 4


def test_two_runners_of_one_pool_on_two_streams(step):
    pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
    runners = [
        GraphRunner(step, StaticBuffers(SPECS, 8, CUDA), pool=pool, stream=stream) for _ in range(2)
    ]
    callers = [torch.cuda.Stream() for _ in range(2)]
    for runner in runners:
        runner.capture([4])
    results = []
    for i in range(6):
        with torch.cuda.stream(callers[i % 2]):
            out = run_with(runners[i % 2], i)
            torch.cuda._sleep(LONG // 4)
            results.append(out["tokens"] + 0)
    torch.cuda.synchronize()
    assert [result.tolist() for result in results] == [[2 * i + 1] * 4 for i in range(6)]
    for runner in runners:
        runner.close()


def wide_step(batch):
    """Use 64 MiB of the pool for each row."""
    return (batch.x[:, None].expand(-1, 16 * MIB) * 2).sum(-1)


def wide_runner(**options):
    specs = {"x": BufferSpec((), torch.float32, 0.0, lambda g, s: torch.rand(s, generator=g))}
    return GraphRunner(wide_step, StaticBuffers(specs, 8, CUDA), **options)


def reserved_mib():
    """What this process has of the driver; free memory is everybody's."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved() / MIB


def test_sleep_returns_memory_to_the_driver_and_wake_verifies():
    with wide_runner() as runner:
        before = reserved_mib()
        runner.capture([1, 8])
        awake = reserved_mib()
        assert awake - before >= 500
        out = runner.run(8, {"x": torch.arange(8.0)})
        assert out.tolist() == [2 * 16 * MIB * i for i in range(8)]
        del out
        runner.sleep()
        assert reserved_mib() <= before
        report = runner.wake()
        assert [graph.verdict for graph in report.graphs] == ["bit-equal"] * 2
        assert reserved_mib() <= awake
        assert runner.run(2, {"x": [1.0, 2.0]}).tolist() == [32 * MIB, 64 * MIB]


def test_held_outputs_stay_readable_after_sleep_and_close():
    with wide_runner() as runner:
        before = reserved_mib()
        runner.capture([1, 2])
        out = runner.run(1, {"x": [1.0]})
        runner.sleep()
        assert out.tolist() == [32 * MIB]
        runner.wake()
        assert runner.run(1, {"x": [2.0]}).tolist() == [64 * MIB]
        assert len(out.tolist()) == 1
    assert len(out.tolist()) == 1
    del out
    assert reserved_mib() <= before


def test_outputs_of_all_batch_sizes_share_their_memory():
    """Of eight graphs with outputs of up to 64 MiB, the pool is as large as for the largest."""

    def step(batch):
        return batch.x[:, None] + torch.zeros(2 * MIB, device=CUDA)

    specs = {"x": BufferSpec((), torch.float32, 0.0, lambda g, s: torch.rand(s, generator=g))}
    with GraphRunner(step, StaticBuffers(specs, 8, CUDA)) as runner:
        alone = runner.capture([8]).graphs[0].pool_mib
        together = sum(graph.pool_mib for graph in runner.capture(range(1, 9)).graphs)
        assert together <= 1.1 * alone
        for n in (8, 3, 1, 5):
            out = runner.run(n, {"x": torch.arange(float(n))})
            assert out.shape == (n, 2 * MIB)
            assert out.mean(1).tolist() == list(range(n))


def test_a_pool_of_the_callers_survives_sleep():
    with wide_runner(pool=torch.cuda.graph_pool_handle()) as runner:
        runner.capture([1, 2])
        for _ in range(2):
            runner.sleep()
            runner.wake()
        assert runner.run(1, {"x": [1.0]}).tolist() == [32 * MIB]


@pytest.mark.parametrize("own_pool", [True, False])
def test_graphs_come_and_go_in_one_pool(own_pool):
    options = {} if own_pool else {"pool": torch.cuda.graph_pool_handle()}
    with wide_runner(**options) as runner:
        runner.capture([8], misses=Misses("capture", max_graphs=2))
        pools = []
        for n in (8, 1, 2, 4, 1, 8, 3):
            out = runner.run(n, {"x": torch.arange(float(n))})
            assert out.tolist() == [32 * MIB * i for i in range(n)]
            del out
            assert len(runner.keys) <= 2
            pools.append(runner._backend.inspector.memory().pool_bytes)
        assert max(pools) <= 1.3 * pools[0]  # the memory of the largest serves all
        assert runner.stats().evictions == 5


def test_a_first_late_capture_that_fails_leaves_the_pool_usable(make_runner):
    toy, failing = ToyStep(), True

    def step(batch):
        if failing and torch.cuda.is_current_stream_capturing():
            batch.tokens.sum().item()
        return toy(batch)

    runner = make_runner(step)
    runner.capture([], misses=Misses("capture", max_graphs=1))
    for _ in range(2):
        with pytest.raises(CaptureError, match="could not capture batch size 4"):
            run_with(runner, 1)
    failing = False
    assert run_with(runner, 1)["tokens"].tolist() == [3] * 4
    assert runner.keys == (Key(4),)


def test_eager_falls_run_on_the_callers_stream(step, make_runner):
    runner = make_runner(step)
    runner.capture([2], misses=Misses("eager"))
    caller, results = torch.cuda.Stream(), []
    inputs = [toy_inputs(4, CUDA) | {"tokens": torch.full((4,), i, device=CUDA)} for i in range(3)]
    torch.cuda.synchronize()
    for i in range(3):
        with torch.cuda.stream(caller):
            results.append(runner.run(4, inputs[i])["tokens"].clone())
    torch.cuda.synchronize()
    assert [result.tolist() for result in results] == [[2 * i + 1] * 4 for i in range(3)]
    assert runner.stats().eager_falls == 3


def test_out_of_memory_at_the_third_of_five_captures(make_runner):
    toy, captures, failing = ToyStep(), [], True

    def step(batch):
        if failing and torch.cuda.is_current_stream_capturing():
            captures.append(1)
            if len(captures) == 3:
                torch.empty(1 << 42, dtype=torch.uint8, device=CUDA)
        return toy(batch)

    runner = make_runner(step, max_batch=16)
    before = reserved_mib()
    match = "could not capture batch size 4: OutOfMemoryError(.|\n)*remedy: the device is out of"
    with pytest.raises(CaptureError, match=match):
        runner.capture([1, 2, 4, 8, 16])
    assert reserved_mib() <= before + 4  # what the allocator keeps of small blocks
    failing = False
    runner.capture([1, 2, 4, 8, 16])
    assert run_with(runner, 3)["tokens"].tolist() == [7] * 4


def test_replay_times_are_those_of_the_device(make_runner):
    def step(batch):
        torch.cuda._sleep(2_000_000)  # about a millisecond
        return batch.tokens + 0

    runner = make_runner(step)
    runner.capture([4], verify=False)
    runner.observe(replay_times=True)
    inputs = toy_inputs(4, CUDA)
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(100):
        runner.run(4, inputs)
    torch.cuda.synchronize()
    elapsed_us = (time.perf_counter() - started) * 1e6
    times = runner.stats().replay_us
    assert times.count + times.missed == 100
    assert times.missed > 0  # the host was far ahead
    assert times.mean >= 500
    assert times.total <= elapsed_us  # of replays, one after the other
    for _ in range(3):
        run_with(runner, 1)
    torch.cuda.synchronize()
    assert runner.stats().replay_us.count == times.count + 3


def staging_of(runner, n, inputs):
    """Run twice; return the names of what the second run gave to the device before its replay."""
    from torch.profiler import ProfilerActivity, profile

    runner.run(n, inputs)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        runner.run(n, inputs)
        torch.cuda.synchronize()
    names = [event.name for event in seen.events()]
    kinds = ("Memcpy HtoD", "multi_tensor_apply", "FillFunctor")
    return [kind for name in names for kind in kinds if kind in name]


def test_a_padded_batch_takes_one_kernel(step, make_runner):
    runner = make_runner(step)
    runner.capture([4])
    inputs = toy_inputs(3)
    assert staging_of(runner, 3, inputs) == ["multi_tensor_apply"]
    inputs["tokens"] = inputs["tokens"].to(CUDA)
    assert staging_of(runner, 3, inputs) == ["multi_tensor_apply"]


def test_large_inputs_take_one_copy_of_a_copy_engine(step, make_runner):
    runner = make_runner(step, max_batch=2**15)
    runner.capture([2**15])
    assert staging_of(runner, 3, toy_inputs(3)) == ["Memcpy HtoD"]


def test_memory_of_another_gpu_is_copied_by_the_driver(step, make_runner, monkeypatch):
    real = torch.as_tensor
    monkeypatch.setattr(torch, "as_tensor", lambda *args, **options: real(*args, **options).clone())
    runner = make_runner(step)
    monkeypatch.undo()
    runner.capture([4])
    inputs = toy_inputs(3)
    assert staging_of(runner, 3, inputs) == ["Memcpy HtoD"]
    out = runner.run(3, inputs)
    assert torch.equal(out["tokens"].cpu(), 2 * inputs["tokens"] + 1)


def test_many_batches_may_be_staged_while_the_device_is_busy(step, make_runner):
    runner = make_runner(step)
    runner.capture([2, 4])
    results = []
    for i in range(8):
        torch.cuda._sleep(LONG // 4)
        n = 3 + i % 2
        out = runner.run(n, toy_inputs(n) | {"tokens": [i] * n})
        results.append(out["tokens"].clone())
    assert [set(result.tolist()) for result in results] == [{2 * i + 1} for i in range(8)]


def test_pools_are_looked_at_without_harm_to_their_handles(step, make_runner):
    runner = make_runner(step)
    for _ in range(300):  # Python counts references to integers above 256 alone
        pool = torch.cuda.graph_pool_handle()
    runner.capture([2], progress=False)
    inspector = runner._backend.inspector
    inspector.pool = pool = tuple(int(str(part)) for part in pool)
    before = [sys.getrefcount(part) for part in pool]
    for _ in range(20):
        inspector.memory()
        inspector.allocations()
        inspector.pool_blocks()
    assert [sys.getrefcount(part) for part in pool] == before
