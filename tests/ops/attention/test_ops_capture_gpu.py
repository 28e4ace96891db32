"""Attention in graphs that others capture: on another stream, in one pool, compiled, at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from ops_cases import PagedCase, assert_same_bits, packed

from ostinato import ops
from ostinato.graphs import BufferSpec, CaptureError, GraphRunner, StaticBuffers
from ostinato.ops.attention import decode_cuda, prefill_cuda
from ostinato.ops.common.workspace import Workspaces

pytestmark = [pytest.mark.gpu, pytest.mark.nvcc]

CUDA = torch.device("cuda")
Step = Callable[[], Any]


def decode(length: int = 5000, batch: int = 1) -> Step:
    case = PagedCase((length,) * batch, heads_q=8, dim=128, page_size=16, dtype=torch.bfloat16)
    args, options = case.build(CUDA)
    return lambda: ops.paged_attention(*args, **options)


def prefill(length: int = 700, batch: int = 3) -> Step:
    args = packed((length,) * batch, heads=(8, 2))
    return lambda: ops.varlen_attention(*args)


STEPS = pytest.mark.parametrize("make", [decode, prefill])


@contextmanager
def fresh_workspaces() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode_cuda, "_workspaces", Workspaces(10 << 20, 1.2))
        patch.setattr(prefill_cuda, "_workspaces", Workspaces())
        yield


@pytest.fixture(autouse=True)
def _fresh_workspaces() -> Iterator[None]:
    with fresh_workspaces():
        yield


@STEPS
@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
def test_a_warm_up_on_another_stream(make: Callable[[], Step], mode: str) -> None:
    step = make()
    expected = step().clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode=mode):
        out = step()
        again = step()
    for _ in range(3):
        out.fill_(torch.nan)
        again.fill_(torch.nan)
        graph.replay()
        assert_same_bits(out, expected)
        assert_same_bits(again, expected)


@STEPS
def test_graphs_of_one_stream_run_at_once(make: Callable[[], Step]) -> None:
    """Each has a pool of its own, so torch allows it; their counters must not be shared."""
    steps = [make(), make()]
    expected = [step().clone() for step in steps]
    stream, others = torch.cuda.Stream(), [torch.cuda.Stream() for _ in steps]
    graphs, outs = [], []
    for step in steps:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(8):
                out = step()
        graphs.append(graph)
        outs.append(out)
    for _ in range(50):
        for out in outs:
            out.fill_(torch.nan)
        torch.cuda.synchronize()
        for graph, other in zip(graphs, others, strict=True):
            with torch.cuda.stream(other):
                graph.replay()
        torch.cuda.synchronize()
        for out, wanted in zip(outs, expected, strict=True):
            assert_same_bits(out, wanted)


def test_a_pool_for_many_sizes_has_one_workspace() -> None:
    """As vLLM does: one pool, the largest batch first, on a stream of its own."""
    steps = {batch: decode(2000, batch) for batch in (64, 32, 8, 1)}
    expected = {batch: step().clone() for batch, step in steps.items()}
    pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
    graphs, outs = {}, {}
    before = torch.cuda.memory_allocated()
    for batch, step in steps.items():
        graphs[batch] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[batch], pool=pool, stream=stream):
            outs[batch] = step()
    spaces = decode_cuda._workspaces
    assert len(spaces._captured) == 1
    held = torch.cuda.memory_allocated() - before
    assert held < 2 * spaces._captured[0].memory.numel() + (4 << 20)
    for batch in (1, 64, 8, 32, 1):
        graphs[batch].replay()
        assert_same_bits(outs[batch], expected[batch])


def test_a_workspace_goes_with_its_last_graph() -> None:
    step = decode()
    step()
    graphs = []
    for _ in range(2):
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            step()
    spaces = decode_cuda._workspaces
    assert len(spaces._captured) == 2
    graphs.pop().reset()
    torch.cuda.synchronize()
    spaces.drop_unused()
    assert len(spaces._captured) == 1
    graphs.pop().reset()
    torch.cuda.synchronize()
    spaces.drop_unused()
    assert not spaces._captured


@STEPS
def test_a_capture_that_fails_holds_nothing(make: Callable[[], Step]) -> None:
    step = make()
    step()

    def fail(_batch: object = None) -> None:
        step()
        if torch.cuda.is_current_stream_capturing():
            raise failure

    def be_invalid(_batch: object) -> None:
        step()
        torch.cuda.synchronize()

    def capture() -> None:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            fail()

    failure = ArithmeticError()
    with pytest.raises(ArithmeticError):
        capture()
    for failing in (fail, be_invalid):  # the graph manager leaves torch usable where torch does not
        runner = GraphRunner(
            failing, StaticBuffers({"x": BufferSpec((), torch.int64, 0)}, 1, "cuda")
        )
        with pytest.raises(CaptureError):
            runner.capture([1], progress=False)
        runner.close()
    torch.cuda.synchronize()
    for spaces in (decode_cuda._workspaces, prefill_cuda._workspaces):
        spaces.drop_unused()
        assert not spaces._captured


def test_a_callable_made_of_graphs() -> None:
    args, options = PagedCase(
        (900, 30), heads_q=8, dim=64, page_size=16, dtype=torch.bfloat16
    ).build(CUDA)
    q, *rest = args

    class Attention(torch.nn.Module):
        def forward(self, q: torch.Tensor) -> torch.Tensor:
            return ops.paged_attention(q, *rest, **options)

    module = Attention().eval()
    with torch.no_grad():
        expected = module(q).clone()
        graphed = torch.cuda.make_graphed_callables(module, (q,))
        assert_same_bits(graphed(q), expected)


@STEPS
def test_a_compiled_step_of_graph_trees(make: Callable[[], Step]) -> None:
    step = make()
    expected = step().clone()
    compiled = torch.compile(lambda x: x + step() - x, mode="reduce-overhead", fullgraph=False)
    zero = torch.zeros_like(expected)
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        assert_same_bits(compiled(zero).clone(), expected)


@pytest.mark.parametrize("invariant", [False, True])
def test_the_size_that_is_said_suffices(invariant: bool) -> None:
    case = PagedCase((5000, 3), heads_q=8, heads_kv=2, dim=128, page_size=16, dtype=torch.bfloat16)
    args, options = case.build(CUDA)
    options["batch_invariant"] = invariant
    size = ops.paged_attention_workspace(
        torch.bfloat16,
        8,
        2,
        128,
        max_batch=2,
        max_pages=args[3].size(1),
        page_size=16,
        batch_invariant=invariant,
    )
    workspace = torch.zeros(size, dtype=torch.uint8, device=CUDA)
    expected = ops.paged_attention(*args, **options)
    with fresh_workspaces():
        assert_same_bits(ops.paged_attention(*args, **options, workspace=workspace), expected)
        assert not decode_cuda._workspaces._eager
    with pytest.raises(ValueError, match="workspace: got 63 bytes, expected at least"):
        ops.paged_attention(*args, **options, workspace=workspace[:63])


def test_the_size_for_prompts_suffices() -> None:
    args = packed((300, 20), heads=(8, 2))
    size = ops.varlen_attention_workspace(torch.bfloat16, args[0].size(2))
    workspace = torch.zeros(size, dtype=torch.uint8, device=CUDA)
    expected = ops.varlen_attention(*args)
    with fresh_workspaces():
        assert_same_bits(ops.varlen_attention(*args, workspace=workspace), expected)
        assert not prefill_cuda._workspaces._eager
