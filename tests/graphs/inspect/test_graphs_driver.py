"""Reading graphs through the driver, here one made of Python objects."""

import struct
import sys

import pytest
from graphs_fakes import Attribute, FakeCuda, FakeGraph, FakeNode, Status

from ostinato.graphs.errors import GraphError
from ostinato.graphs.inspect.driver import NOT_INSTALLED, GraphDriver
from ostinato.graphs.inspect.nodes import Edge, Word

A, B = 0x7F12_3450_0000, 0x7F12_4000_0100


def read(cuda, *nodes, edges=()):
    return cuda.reader().read(cuda.handle(FakeGraph(nodes, edges)))


def words_of(*parameters, **options):
    cuda = FakeCuda()
    nodes = read(cuda, FakeNode("kernel", b"k", parameters, **options))
    return nodes.nodes[0].words


def test_nodes_of_all_kinds_are_named():
    nodes = read(FakeCuda(), *(FakeNode(kind) for kind in ("empty", "host", "free", "host")))
    assert [node.kind for node in nodes.nodes] == ["empty", "host", "free", "host"]
    assert nodes.kinds() == {"host": 2, "empty": 1, "free": 1}
    assert nodes.kernels() == {}


def test_an_empty_graph():
    nodes = read(FakeCuda())
    assert (nodes.nodes, nodes.edges) == ([], [])


def test_a_kernel_has_its_name_as_in_the_source_and_its_launch():
    node = FakeNode("kernel", b"_ZN8ostinato6decodeILi128EEEvi")
    (kernel,) = read(FakeCuda(), node).nodes
    assert kernel.name == "void ostinato::decode<128>(int)"
    assert (kernel.grid, kernel.block) == ((132, 2, 1), (384, 1, 1))
    assert str(kernel) == "kernel void ostinato::decode<128>(int)"


def test_edges_know_which_launches_overlap():
    nodes = [FakeNode("kernel", b"k") for _ in range(3)]
    nodes = read(FakeCuda(), *nodes, edges=[(0, 1, True), (1, 2, False)])
    assert nodes.edges == [Edge(0, 1, True), Edge(1, 2)]
    assert nodes.programmatic_edges() == 1


@pytest.mark.parametrize("as_buffer", [False, True])
@pytest.mark.parametrize("as_kernel", [False, True])
def test_addresses_in_parameters_and_inside_of_structs(as_buffer, as_kernel):
    options = {"as_buffer": as_buffer, "as_kernel": as_kernel}
    struct_ = struct.pack("<QqiiQ", A, -1, 128, 0, B)
    words = words_of((0, struct.pack("<i", 3)), (8, struct_), (40, struct.pack("<Q", B)), **options)
    assert [word.value for word in words] == [A, B, B]
    if not as_buffer:
        assert [word.place for word in words] == [
            "parameter 1",
            "parameter 1, byte 24",
            "parameter 2",
        ]


def test_a_word_across_two_halves_is_not_one():
    assert A not in [word.value for word in words_of((0, struct.pack("<iQi", 1, A, 1)))]
    assert words_of((4, struct.pack("<iQ", 1, A))) == [Word(A, "parameter 0, byte 4")]


def test_a_kernel_without_parameters():
    assert words_of() == []


def test_a_driver_without_parameters_is_reported():
    node = FakeNode("kernel", b"k", layout_status=Status.CUDA_ERROR_NOT_SUPPORTED)
    (kernel,) = read(FakeCuda(), node).nodes
    assert "does not tell its parameters: CUDA_ERROR_NOT_SUPPORTED" in kernel.unread


@pytest.mark.parametrize(
    ("copy", "expected"),
    [
        (
            {"srcMemoryType": 1, "srcHost": A, "dstMemoryType": 2, "dstDevice": B},
            [(A, "source"), (B, "destination")],
        ),
        (
            {"srcMemoryType": 4, "srcDevice": A, "dstMemoryType": None, "dstDevice": B},
            [(A, "source"), (B, "destination")],
        ),
        ({"srcMemoryType": 2, "srcDevice": A, "dstMemoryType": 3}, [(A, "source")]),
    ],
)
def test_copies_have_two_ends(copy, expected):
    (node,) = read(FakeCuda(), FakeNode("memcpy", copy=copy)).nodes
    assert [(word.value, word.place) for word in node.words] == expected
    assert all(word.is_address for word in node.words)


def test_memset_and_conditional_nodes():
    nodes = read(FakeCuda(), FakeNode("memset", destination=A), FakeNode("conditional"))
    memset, conditional = nodes.nodes
    assert memset.words == [Word(A, "destination", is_address=True)]
    assert conditional.unread == "the graphs in its body are not read"


def test_child_graphs_are_read_too():
    child = FakeGraph([FakeNode("kernel", b"inner"), FakeNode("empty")], [(0, 1, False)])
    nodes = read(
        FakeCuda(),
        *(FakeNode("child graph", child=child), FakeNode("kernel", b"outer")),
        edges=[(0, 1, False)],
    )
    assert [node.name or node.kind for node in nodes.nodes] == [
        *("child graph", "outer", "inner", "empty")
    ]
    assert nodes.edges == [Edge(0, 1), Edge(2, 3)]


def test_a_kernels_handle_may_be_another_ones_in_the_next_graph():
    cuda = FakeCuda()
    node = FakeNode("kernel", b"unloaded", [(0, struct.pack("<Q", A)), (8, struct.pack("<Q", B))])
    reader, handle = cuda.reader(), cuda.handle(FakeGraph([node] * 3))
    assert reader.read(handle).kernels() == {"unloaded": 3}
    node.name, node.parameters = b"loaded since", [(0, struct.pack("<iiQ", 1, 0, B))]
    nodes = reader.read(handle)
    assert nodes.kernels() == {"loaded since": 3}
    assert nodes.nodes[0].words == [Word(B, "parameter 0, byte 8")]
    assert cuda.calls.count("name") == 2  # once a graph


def test_memory_that_the_driver_knows():
    cuda = FakeCuda()
    cuda.ranges = [(2, 1, A, 64), (1, 0, B, 8)]
    reader = cuda.reader()
    assert reader.location_of(A + 63) == "device 1"
    assert reader.location_of(A + 64) is None
    assert reader.location_of(B) == "the host"


def test_a_refusal_of_the_driver_is_named(monkeypatch):
    cuda = FakeCuda()
    refusal = (Status.CUDA_ERROR_NOT_SUPPORTED, None, None)
    monkeypatch.setattr(cuda, "cuGraphGetNodes", lambda *arguments: refusal)
    with pytest.raises(GraphError, match="cuGraphGetNodes: CUDA_ERROR_NOT_SUPPORTED"):
        read(cuda)


@pytest.mark.parametrize("name", ["cuGraphGetEdges_v2", "cuFuncGetParamInfo", "cuFuncGetName"])
@pytest.mark.parametrize("error", [AttributeError, RuntimeError])
def test_an_older_driver_lacks_functions(name, error, monkeypatch):
    """Ctypes raises AttributeError for them, cuda-python RuntimeError."""

    def missing(*arguments):
        raise error(f'Function "{name}" not found')

    cuda = FakeCuda()
    monkeypatch.setattr(cuda, name, missing)
    with pytest.raises(GraphError, match=f'could not be read: Function "{name}" not found'):
        read(cuda, FakeNode("kernel", b"k"))


def test_without_cuda_python(monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    with pytest.raises(GraphError) as info:
        GraphDriver.load()
    assert str(info.value) == NOT_INSTALLED


def test_the_names_used_here_are_those_of_cuda_python():
    driver = pytest.importorskip("cuda.bindings.driver", reason="needs cuda-python, not a GPU")
    assert {name for name in vars(FakeCuda) if name.startswith("cu")} - set(dir(driver)) == {
        "cuGraphGetEdges_v2"  # of the library
    }
    for name in Status.__members__:
        assert int(getattr(driver.CUresult, name)) == Status[name]
    for name in Attribute.__members__:
        assert int(getattr(driver.CUpointer_attribute, name)) == Attribute[name]
    assert int(driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_CONDITIONAL) == 13
