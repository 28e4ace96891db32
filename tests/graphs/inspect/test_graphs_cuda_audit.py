"""The report, the audit and the drawing of real CUDA graphs, read through cuda-python."""

import ctypes

import pytest
import torch
from graphs_toys import SPECS, toy_inputs

from ostinato import ops
from ostinato.graphs import AuditError, BufferSpec, GraphError, GraphRunner, StaticBuffers

pytestmark = pytest.mark.gpu

CUDA = "cuda"


@pytest.fixture
def device():
    """Only CUDA: everything here runs under `make test-gpu` alone."""
    return torch.device(CUDA)


@pytest.fixture
def libcuda():
    return ctypes.CDLL("libcuda.so.1")


def stream_handle():
    return ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)


def capturing():
    return torch.cuda.is_current_stream_capturing()


def plain_step(batch):
    """One kernel whose parameters hold nothing but its addresses and a count."""
    return batch.tokens + 1


def problems(report):
    return [finding.problem for graph in report.graphs for finding in graph.findings]


def test_the_report_has_the_nodes_and_times_of_each_graph(make_runner):
    runner = make_runner(lambda batch: (batch.tokens + 1) * 2)
    report = runner.capture([1, 4])
    assert report.not_inspected is None, str(report)
    for graph in report.graphs:
        assert graph.nodes == {"kernel": 2}
        assert sum(graph.kernels.values()) == 2
        assert all("elementwise" in name for name in graph.kernels), graph.kernels
        assert (graph.edges, graph.pdl_edges) == (1, 0)
        assert graph.instantiate_ms > 0
        assert graph.audit_ms > 0
        assert 0 < graph.replay_us < 1000
    assert "elementwise" in str(report)


def test_a_plain_step_passes_a_strict_audit(make_runner):
    runner = make_runner(plain_step)
    assert problems(runner.capture([1, 8], audit="strict")) == []
    assert runner.run(3, toy_inputs(3) | {"tokens": [1, 2, 3]}).tolist() == [2, 3, 4]


def test_our_launches_overlap_and_pass_a_strict_audit(device):
    weight = torch.ones(256, dtype=torch.bfloat16, device=device)

    def step(batch):
        _, _, total = ops.rms_norm_quantize(batch.x, weight, 1e-6, torch.int8, residual=batch.x)
        return ops.rms_norm_quantize(total, weight, 1e-6, torch.int8)[0]

    buffers = StaticBuffers({"x": BufferSpec((256,), torch.bfloat16, 1.0)}, 8, device)
    with GraphRunner(step, buffers, memory={"weight": weight}) as runner:
        report = runner.capture([8], audit="strict")
    (graph,) = report.graphs
    assert graph.nodes == {"kernel": 2}
    assert graph.pdl_edges == 1, str(report)
    assert all("ostinato" in name for name in graph.kernels), graph.kernels


def test_undeclared_weights_are_named_with_the_kernel(device):
    weight = torch.ones(8, dtype=torch.int64, device=device)

    def step(batch):
        return batch.tokens + weight[: batch.size]

    buffers = StaticBuffers(SPECS, 8, device)
    with GraphRunner(step, buffers, memory={"weight": weight}) as runner:
        assert problems(runner.capture([8], audit="strict")) == []
    with GraphRunner(step, buffers, memory={}) as runner:
        with pytest.raises(AuditError, match=r"kernel .*elementwise.* that was not declared: \d+"):
            runner.capture([8], audit="strict")
        runner.capture([8])  # reported only


def test_memory_freed_since_the_capture_is_found(make_runner):
    weights = [torch.ones(8, dtype=torch.int64, device=CUDA) for _ in range(2)]

    def step(batch):
        out = batch.tokens + weights[-1][: batch.size]
        if capturing() and len(weights) > 1:
            weights.pop()
        return out

    runner = make_runner(step)
    with pytest.raises(AuditError, match=r"kernel .*elementwise.*is in freed memory: \d+ bytes"):
        runner.capture([8], audit="strict")


def test_a_host_node_is_refused(libcuda, make_runner):
    callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda data: None)

    def step(batch):
        if capturing():
            assert libcuda.cuLaunchHostFunc(stream_handle(), callback, None) == 0
        return plain_step(batch)

    runner = make_runner(step)
    with pytest.raises(AuditError, match="host: calls a function of the host"):
        runner.capture([4], audit="strict")


def test_an_allocation_node_is_refused(libcuda, make_runner):
    def step(batch):
        address = ctypes.c_uint64()
        stream = stream_handle()
        assert libcuda.cuMemAllocAsync(ctypes.byref(address), ctypes.c_size_t(512), stream) == 0
        assert libcuda.cuMemFreeAsync(address, stream) == 0
        return plain_step(batch)

    runner = make_runner(step)
    with pytest.raises(AuditError) as info:
        runner.capture([4], audit="strict")
    assert "allocation: allocates memory" in str(info.value)
    assert "free: frees memory" in str(info.value)


def test_a_copy_from_pageable_memory_is_refused(libcuda, make_runner):
    source = (ctypes.c_int64 * 4)()
    target = torch.zeros(4, dtype=torch.int64, device=CUDA)

    def step(batch):
        if capturing():
            address, size = ctypes.c_uint64(target.data_ptr()), ctypes.c_size_t(32)
            libcuda.cuMemcpyHtoDAsync_v2(address, source, size, stream_handle())
        return plain_step(batch)

    runner = make_runner(step)
    # A driver that does not even capture such a copy names the hazard no less.
    with pytest.raises(GraphError, match=r"source is in pageable memory|could not capture"):
        runner.capture([4], audit="strict")


def test_memory_of_another_allocator_must_be_declared(libcuda, make_runner, device):
    address = ctypes.c_uint64()
    torch.cuda.synchronize()
    assert libcuda.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(1 << 21)) == 0

    def step(batch):
        if capturing():
            count = ctypes.c_size_t(16)
            libcuda.cuMemsetD32Async(address, ctypes.c_uint(0), count, stream_handle())
        return plain_step(batch)

    try:
        with pytest.raises(AuditError, match="memset: destination is in memory on device 0 that"):
            make_runner(step).capture([4], audit="strict")
    finally:
        torch.cuda.synchronize()
        libcuda.cuMemFree_v2(address)


def test_dump_draws_the_kernels(make_runner, tmp_path):
    runner = make_runner(lambda batch: (batch.tokens + 1) * 2)
    runner.capture([4])
    path = tmp_path / "step.dot"
    runner.dump(4, path)
    text = path.read_text(encoding="utf-8")
    assert text.count("elementwise") == 2
    assert "n0 -> n1;" in text


def test_graphs_of_a_step_with_library_calls_are_read(device):
    layers = [torch.randn(512, 512, dtype=torch.bfloat16, device=device) / 23 for _ in range(2)]

    def step(batch):
        return (torch.relu(batch.x @ layers[0]) @ layers[1]).argmax(-1)

    buffers = StaticBuffers({"x": BufferSpec((512,), torch.bfloat16, 0.0)}, 64, device)
    with GraphRunner(step, buffers, memory={"layers": layers}) as runner:
        for _ in range(2):  # cuBLAS's workspace is the captures' own, in the second series too
            report = runner.capture()
            assert report.not_inspected is None
            assert all(graph.nodes["kernel"] >= 4 for graph in report.graphs), str(report)
            # Torch's own kernels carry uninitialised bytes, which may look like anything.
            found = [f for graph in report.graphs for f in graph.findings]
            assert [f for f in found if "at::native" not in f.name] == [], str(report)
