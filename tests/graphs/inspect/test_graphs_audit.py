"""The audit of what a runner captures, over a backend that records without a GPU."""

import json

import pytest
import torch
from graphs_fakes import RecordingBackend
from graphs_toys import SPECS, ToyStep, toy_inputs

from ostinato.graphs import (
    AuditError,
    CaptureError,
    GraphError,
    GraphRunner,
    NotCapturedError,
    StaticBuffers,
)
from ostinato.graphs.inspect.allocations import Allocation, State
from ostinato.graphs.inspect.audit import Finding, summarize
from ostinato.graphs.inspect.nodes import Edge, GraphNodes, Node, Word

# Memory of the device, far from everything that the test's own process has.
POOL, LIVE, FREED, FOREIGN, NOWHERE, PINNED = (0x10_0000_0000 + (i << 24) for i in range(6))
OUTSIDE = 0x99_0000_0000
PRESENT = [
    Allocation(POOL, 1 << 20, "the graphs' pool"),
    Allocation(LIVE, 4096, "4096 bytes of torch's allocator", State.LIVE),
    Allocation(FREED, 512, "512 bytes of torch's allocator", State.FREED),
    Allocation(PINNED, 64, "the last one", State.LIVE),
]
KNOWN_TO_DRIVER = [Allocation(FOREIGN, 256, "device 0"), Allocation(OUTSIDE, 64, "the host")]


def kernel(*addresses, name="decode"):
    return Node("kernel", name, words=[Word(a, f"parameter {i}") for i, a in enumerate(addresses)])


def copy(source, destination):
    return Node(
        "memcpy", words=[Word(source, "source", True), Word(destination, "destination", True)]
    )


@pytest.fixture
def make(monkeypatch):
    """Make a runner whose every graph consists of the given nodes, and its backend."""

    def make(*nodes, edges=(), **options):
        backend = RecordingBackend(GraphNodes(nodes, edges))
        backend.present, backend.foreign = list(PRESENT), list(KNOWN_TO_DRIVER)
        monkeypatch.setattr("ostinato.graphs.runner.backend_for", lambda *a: backend)
        runner = GraphRunner(ToyStep(), StaticBuffers(SPECS, 8, "cpu"), **options)
        return runner, backend

    return make


def problems(report):
    (graph,) = report.graphs
    return [finding.problem for finding in graph.findings]


def test_nodes_kernels_and_overlaps_are_reported(make):
    runner, _ = make(
        *(kernel(name="rms_norm"), kernel(), kernel(), Node("memset")),
        edges=[Edge(0, 1, True), Edge(1, 2, True), Edge(2, 3)],
    )
    report = runner.capture([1, 4])
    for graph in report.graphs:
        assert graph.nodes == {"kernel": 3, "memset": 1}
        assert graph.kernels == {"decode": 2, "rms_norm": 1}
        assert (graph.edges, graph.pdl_edges) == (3, 2)
        assert graph.replay_us == 12.5
        assert graph.audit_ms > 0
        assert graph.findings == ()
    text = str(report)
    assert "    2 × decode\n" in text
    assert [word in text for word in ("nodes", "PDL edges", "replay µs")] == [True] * 3
    loaded = json.loads(report.to_json())
    assert loaded["graphs"][1]["kernels"] == {"decode": 2, "rms_norm": 1}
    assert loaded["not_inspected"] is None


def test_replays_are_not_timed_on_padding(make):
    runner, _ = make(kernel())
    assert runner.capture([1], verify=False).graphs[0].replay_us is None


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        ("host", "calls a function of the host"),
        ("allocation", "allocates memory"),
        ("free", "frees memory"),
        ("event record", "records an event"),
        ("event wait", "waits for an event"),
    ],
)
def test_nodes_that_do_not_belong_in_a_graph(kind, problem, make):
    runner, _ = make(kernel(), Node(kind))
    report = runner.capture([2])
    assert report.graphs[0].findings[0].node == 1
    assert problem in str(report)
    with pytest.raises(AuditError, match=f"batch size 2 is refused:\nnode 1, {kind}: {problem}"):
        runner.capture([2], audit="strict")
    with pytest.raises(NotCapturedError):
        runner.run(1, toy_inputs(1))
    runner.capture([2])
    assert runner.run(1, toy_inputs(1))["tokens"].shape == (1,)


@pytest.mark.parametrize("kind", ["memcpy", "memset", "empty", "child graph"])
def test_other_nodes_are_allowed(kind, make):
    runner, _ = make(Node(kind))
    assert runner.capture([2], audit="strict").graphs[0].findings == ()


@pytest.mark.parametrize(
    ("address", "problem"),
    [
        (POOL + 5, None),
        (LIVE + 4095, None),
        (LIVE - 1, "parameter 0 looks like an address of the device, where no memory is"),
        (FREED, "parameter 0 is in freed memory: 512 bytes of torch's allocator"),
        (
            FOREIGN + 255,
            "parameter 0 is in memory on device 0 that torch did not allocate and nobody declared",
        ),
        (OUTSIDE, "parameter 0 is in pinned memory of the host that was not declared"),
        (1 << 50, None),  # a number that is no address
    ],
)
def test_addresses_in_kernels(address, problem, make):
    runner, _ = make(kernel(address, name="attention"))
    report = runner.capture([2])
    assert problems(report) == ([] if problem is None else [problem])
    if problem is None or "looks like" in problem:
        runner.capture([2], audit="strict")
        return
    with pytest.raises(AuditError) as info:
        runner.capture([2], audit="strict")
    assert f"node 0, kernel attention: {problem} ({address:#x})" in str(info.value)


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        (POOL, None),
        (0x7_0000, "source is in pageable memory of the host, or in memory that has been given"),
        (OUTSIDE, "source is in pinned memory of the host that was not declared"),
        (FREED, "source is in freed memory"),
    ],
)
def test_ends_of_copies(source, problem, make):
    runner, _ = make(copy(source, POOL))
    found = problems(runner.capture([2]))
    assert [text.startswith(problem or "") for text in found] == [True] * (problem is not None)


def test_static_buffers_are_known(make):
    runner, backend = make(Node("empty"))
    buffers = runner._buffers
    addresses = [buffers.view(1)[name].data_ptr() for name in SPECS]
    addresses.append(buffers.n_active.data_ptr())
    backend.present.append(Allocation(min(addresses), 1 << 30, "all", State.FREED))
    backend.recorded = GraphNodes([copy(address, POOL) for address in addresses], [])
    assert problems(runner.capture([2])) == []


def test_declared_memory_stays_and_the_rest_is_found(make):
    weights, cache = torch.nn.Linear(4, 4), [torch.zeros(100), torch.zeros(100)]
    stray = torch.zeros(100)
    runner, backend = make(
        copy(weights.bias.data_ptr(), cache[1][50:].data_ptr()),
        copy(stray.data_ptr(), POOL),
        memory={"weights": weights, "cache": (tensor for tensor in cache)},
    )
    backend.present += [
        Allocation(tensor.data_ptr(), 4 * tensor.numel(), "torch", State.LIVE)
        for tensor in (weights.bias, *cache, stray)
    ]
    for _ in range(2):  # what was declared is not used up
        report = runner.capture([2])
        assert problems(report) == ["source is in memory that was not declared: torch"]
        assert report.graphs[0].findings[0].node == 1


def test_numbers_between_declared_memory_are_no_addresses(make):
    far = torch.zeros(100)
    runner, _ = make(kernel(far.data_ptr() - (1 << 40)), kernel(LIVE - 1), memory={"cache": far})
    assert [finding.node for finding in runner.capture([2]).graphs[0].findings] == [1]


class _OwnParameter(torch.nn.Parameter):
    """Of a type of its own, as libraries have them."""


def test_tensors_of_another_allocator_are_live_while_they_are(make):
    _without_storage = torch.zeros(3, 3).to_sparse()
    held = bytearray(400)  # which no other tensor gets when this one is deleted
    foreign = _OwnParameter(torch.frombuffer(held, dtype=torch.float32), False)
    address = foreign.data_ptr()
    there = Allocation(address, 400, "device 0")
    problem = "parameter 0 is in memory on device 0 that torch did not allocate and nobody declared"
    for memory, found in ((None, []), ({}, [problem])):
        runner, backend = make(kernel(foreign[50:].data_ptr()), memory=memory)
        backend.foreign.append(there)
        assert problems(runner.capture([2])) == found
    runner, backend = make(kernel(address))
    backend.foreign.append(there)
    assert problems(runner.capture([2])) == []
    del foreign
    assert problems(runner.capture([2])) == [problem]


def test_weights_may_move_between_captures(make):
    weights = torch.nn.Linear(4, 4)
    runner, backend = make(Node("empty"), memory={"weights": weights})
    for _ in range(2):
        weights.bias = torch.nn.Parameter(torch.zeros(4))
        address = weights.bias.data_ptr()
        backend.present = [Allocation(address, 16, "torch", State.LIVE), *PRESENT]
        backend.recorded = GraphNodes([copy(address, POOL)], [])
        assert problems(runner.capture([2])) == []


def test_memory_made_by_captures_stays_known_in_the_next(make):
    runner, backend = make(kernel(OUTSIDE), memory={})
    workspace = Allocation(OUTSIDE, 4096, "a workspace", State.LIVE)
    backend.on_capture = lambda: backend.present.append(workspace)
    assert problems(runner.capture([2])) == []
    backend.on_capture = lambda: None
    assert problems(runner.recapture()) == []
    # Freed, and the memory given to a tensor of somebody else's: it is not the captures' any more.
    backend.present.remove(workspace)
    runner.recapture()
    backend.present.append(workspace)
    assert problems(runner.recapture()) == [
        "parameter 0 is in memory that was not declared: a workspace"
    ]


def test_memory_that_a_library_keeps_needs_no_declaration(make):
    """It may lie where other memory was freed since the captures began."""

    kept = torch.zeros(100)
    address = kept.data_ptr()
    runner, backend = make(kernel(address), memory={})
    backend.present.append(Allocation(address, 400, "a workspace", State.LIVE))
    problem = "parameter 0 is in memory that was not declared: a workspace"
    assert problems(runner.capture([2])) == [problem]
    kept.kept_for_graphs = True
    assert problems(runner.recapture()) == []
    kept.kept_for_graphs = False
    assert problems(runner.recapture()) == [problem]
    kept.kept_for_graphs = True
    del kept
    assert problems(runner.recapture()) == [problem]


@pytest.mark.parametrize("memory", [{"weights": 3}, {"cache": ["a"]}, {"cache": "a"}, [1]])
def test_bad_memory(memory, make):
    with pytest.raises(TypeError, match=r"memory.*: got (int|str|list), expected"):
        make(memory=memory)


@pytest.mark.parametrize("audit", ["stricter", None, True])
def test_bad_audit(audit, make):
    runner, _ = make()
    for call in (runner.capture, runner.recapture):
        with pytest.raises(ValueError, match=r"audit: got .*, expected one of \['off', 'report'"):
            call(audit=audit)


def test_without_cuda_python_the_report_says_so(make):
    runner, backend = make(Node("host"))
    backend.unreadable = "cuda-python is not installed"
    report = runner.capture([1, 2])
    assert report.not_inspected == "cuda-python is not installed"
    assert "nodes were not inspected: cuda-python is not installed" in str(report)
    assert [graph.nodes for graph in report.graphs] == [None, None]
    with pytest.raises(GraphError, match="audit='strict' cannot be done: cuda-python is not"):
        runner.capture([1, 2], audit="strict")


def test_a_graph_that_cannot_be_read(make):
    runner, backend = make()
    backend.fails_to_read = "cuGraphGetNodes: CUDA_ERROR_NOT_SUPPORTED"
    report = runner.capture([2])
    assert "nodes were not inspected: cuGraphGetNodes: CUDA_ERROR_NOT_SUPPORTED" in str(report)
    assert report.graphs[0].findings is None
    with pytest.raises(CaptureError, match=r"could not audit batch size 2: .*cuGraphGetNodes"):
        runner.capture([2], audit="strict")


def test_audit_off_reads_nothing(make):
    runner, backend = make(Node("host"))
    backend.fails_to_read = "must not be read"
    report = runner.capture([2], audit="off")
    assert report.not_inspected == "audit='off'"
    assert report.graphs[0].nodes is None


def test_a_gap_in_what_was_read_is_found(make):
    runner, _ = make(Node("conditional", unread="the graphs in its body are not read"))
    with pytest.raises(AuditError, match="conditional: the graphs in its body are not read"):
        runner.capture([2], audit="strict")


def test_repeated_findings_are_shown_once_with_their_number():
    findings = [Finding(i, "kernel a", "is bad", 0x1000 + i) for i in range(32)]
    findings += [Finding(40 + i, f"kernel b{i}", "is worse") for i in range(7)]
    lines = summarize(findings).splitlines()
    assert lines[0] == "node 0, kernel a: is bad (0x1000), and 31 more such"
    assert lines[-1] == "and 3 others"
    assert len(lines) == 6


def test_dump_writes_a_drawing(make, tmp_path):
    runner, _ = make(kernel(), Node("memset"), edges=[Edge(0, 1, True)])
    path = tmp_path / "step.dot"
    with pytest.raises(NotCapturedError):
        runner.dump(2, path)
    runner.capture([1, 2])
    runner.dump(2, str(path))
    assert path.read_text(encoding="utf-8").startswith('digraph "batch size 2 on cpu" {')
    with pytest.raises(ValueError, match=r"batch_size: got 3, expected one of \[1, 2\]"):
        runner.dump(3, path)
    with pytest.raises(TypeError, match=r"batch_size: got 2\.0"):
        runner.dump(2.0, path)


def test_dump_of_nothing_on_a_plain_cpu(step, tmp_path):
    runner = GraphRunner(step, StaticBuffers(SPECS, 8, "cpu"))
    report = runner.capture([1], audit="strict")  # nothing is recorded, and nothing refused
    assert report.not_inspected is None
    assert report.graphs[0].nodes is None
    with pytest.raises(GraphError, match="no graph is recorded on cpu: nothing to dump"):
        runner.dump(1, tmp_path / "step.dot")
    assert not (tmp_path / "step.dot").exists()
