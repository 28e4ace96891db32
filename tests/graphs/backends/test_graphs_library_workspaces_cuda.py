"""Graphs whose step calls cuBLAS write into no memory but their own, whoever clears it."""

import pytest
import torch

from ostinato.graphs import BufferSpec, GraphRunner, Misses, StaticBuffers

pytestmark = pytest.mark.gpu

CUDA = "cuda"
DEPTH = 16384  # long sums of few rows and columns: cuBLAS splits them and adds up in its workspace
MIB = 1 << 20


def draw(generator, shape):
    return torch.randn(shape, generator=generator)


SPECS = {"x": BufferSpec((DEPTH,), torch.bfloat16, 0.0, draw)}


@pytest.fixture(scope="module")
def weights():
    make = torch.Generator(CUDA).manual_seed(5)
    return [
        torch.randn(DEPTH, n, device=CUDA, generator=make).bfloat16() / 128 for n in (64, 256, 1024)
    ]


def products(batch, weights):
    x = batch.x
    sums = [x @ weight for weight in weights]
    sums.append(x.float() @ weights[0].float())
    return {f"out{i}": out for i, out in enumerate(sums)}


def forked(batch, weights):
    """The same with every second product on another stream."""
    here, side = torch.cuda.current_stream(), forked.side
    side.wait_stream(here)
    with torch.cuda.stream(side):
        other = [batch.x @ weight for weight in weights]
    out = products(batch, weights)
    here.wait_stream(side)
    return out | {f"side{i}": product for i, product in enumerate(other)}


def fill_free_memory(value):
    """Take what the allocator has and 512 MiB more, a MiB at a time."""
    size = torch.cuda.memory_reserved() + 512 * MIB
    return [
        torch.full((MIB,), value, dtype=torch.uint8, device=CUDA) for _ in range(size // 2 // MIB)
    ]


def wreck(canaries):
    return [i for i, canary in enumerate(canaries) if not bool((canary == 77).all())]


@pytest.mark.parametrize("step", [products, forked])
@pytest.mark.parametrize("given", ["no stream", "a stream"])
def test_a_clear_gives_nothing_of_a_graph_to_others(step, given, weights):
    forked.side = torch.cuda.Stream()
    stream = torch.cuda.Stream() if given == "a stream" else None
    if stream is not None:
        with torch.cuda.stream(stream):
            torch.randn(8, DEPTH, device=CUDA) @ weights[0].float()  # has a workspace now
    buffers = StaticBuffers(SPECS, 8, CUDA)
    runner = GraphRunner(lambda batch: step(batch, weights), buffers, stream=stream)
    runner.capture([1, 8], progress=False)
    x = torch.randn(8, DEPTH, device=CUDA).bfloat16()
    want = {name: rows.clone() for name, rows in runner.run(8, {"x": x}).items()}
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    canaries = fill_free_memory(77)
    for _ in range(3):
        got = runner.run(8, {"x": x})
        assert all(torch.equal(got[name], rows) for name, rows in want.items())
        runner.run(1, {"x": x[:1]})
    assert wreck(canaries) == []
    runner.close()


def test_eager_code_gets_a_workspace_of_its_own(weights):
    stream = torch.cuda.Stream()
    buffers = StaticBuffers(SPECS, 8, CUDA)
    runner = GraphRunner(lambda batch: products(batch, weights), buffers, stream=stream)
    runner.capture([8], progress=False)
    x = torch.randn(8, DEPTH, device=CUDA).bfloat16()
    want = runner.run(8, {"x": x})["out1"].clone()
    torch.cuda.synchronize()
    for _ in range(50):
        with torch.cuda.stream(stream):
            for weight in weights:
                x @ weight
        got = runner.run(8, {"x": x})["out1"]  # on the caller's stream, at the same time
        assert torch.equal(got, want)
    runner.close()


def test_captures_clears_and_sleep_leave_no_memory_behind(weights):
    buffers = StaticBuffers(SPECS, 8, CUDA)
    runner = GraphRunner(lambda batch: products(batch, weights), buffers)
    used = []
    for _ in range(4):
        runner.capture([1, 8], progress=False)
        torch._C._cuda_clearCublasWorkspaces()
        runner.sleep()
        torch.cuda.synchronize()
        used.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
        runner.wake(progress=False)
    assert used[1] == used[2] == used[3]
    runner.close()


def test_late_captures_need_no_workspace_more_each(weights):
    buffers = StaticBuffers(SPECS, 64, CUDA)
    runner = GraphRunner(lambda batch: products(batch, weights), buffers)
    runner.capture([1], progress=False, misses=Misses("capture"))
    held = []
    for n in (2, 4, 8, 16, 32):
        x = torch.randn(n, DEPTH, device=CUDA).bfloat16()
        got = {name: rows.clone() for name, rows in runner.run(n, {"x": x}).items()}
        torch._C._cuda_clearCublasWorkspaces()
        want = products(type("Batch", (), {"x": x}), weights)
        for name, rows in got.items():
            torch.testing.assert_close(rows, want[name])
        del got, want
        held.append(torch.cuda.memory_reserved())
    assert held[-1] - held[1] < 24 * MIB
    runner.close()
