"""Reads captured graphs through cuda-python: nodes, edges, and what the driver knows of memory."""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import GraphError
from .demangle import demangle
from .nodes import Edge, GraphNodes, Node, Word, aligned_words

# CUgraphNodeType. "alloc" and "free" nodes are named as what they do to the graph's memory.
_KINDS = (
    *("kernel", "memcpy", "memset", "host", "child graph", "empty", "event wait", "event record"),
    *("semaphore signal", "semaphore wait", "allocation", "free", "batch memory operation"),
    "conditional",
)
# What these hold is not read.
_UNREAD = {
    "conditional": "the graphs in its body are not read",
    "batch memory operation": "its addresses are not read",
}
_CHILD_GRAPH = _KINDS.index("child graph")
_PROGRAMMATIC = 1  # CUgraphDependencyType
_HOST, _ARRAY, _UNIFIED = 1, 3, 4  # CUmemorytype
_MAX_PARAMETERS = 4096  # the size in bytes of a kernel's parameters, before CUDA 12.1
# Keys of the `extra` array, the other way to give a kernel its parameters: one buffer.
_EXTRA_BUFFER, _EXTRA_SIZE = 1, 2

NOT_INSTALLED = "cuda-python is not installed: pip install 'ostinato[cuda]'"


class GraphDriver:
    """Reads graphs. No call changes anything.

    Args:
        bindings: the module `cuda.bindings.driver`.
        library: the driver library, for what the bindings get wrong.
    """

    def __init__(self, bindings: Any, library: Any) -> None:
        self._cu = bindings
        self._library = library
        self._functions: dict[tuple[int, int], _Function] = {}

    @classmethod
    def load(cls) -> GraphDriver:
        """Return a reader over the installed cuda-python.

        Raises:
            GraphError: when it is not installed, or finds no driver.
        """
        try:
            bindings = importlib.import_module("cuda.bindings.driver")
        except ImportError as error:
            raise GraphError(NOT_INSTALLED) from error
        try:
            return cls(bindings, ctypes.CDLL("libcuda.so.1"))
        except OSError as error:
            raise GraphError(f"no CUDA driver: {error}") from error

    def read(self, graph: int) -> GraphNodes:
        """Return what a `cudaGraph_t` consists of, given its address.

        Raises:
            GraphError: when the driver refuses, or is too old for it (before CUDA 12.4).
        """
        # By handles, which the driver gives again once the code they stood for is unloaded.
        self._functions.clear()
        try:
            return self._read(graph)
        except GraphError:
            raise
        except (AttributeError, RuntimeError) as error:  # as ctypes and the bindings say it
            raise GraphError(f"the graph could not be read: {error}") from error

    def location_of(self, address: int) -> str | None:
        """Return "device 0" or "the host", which means pinned; None where the driver knows none."""
        attribute = self._cu.CUpointer_attribute
        # Asked alone, since only then an address that is unknown is an error and not a zero.
        kind = self._attribute(attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE, address)
        if kind is None:
            return None
        if kind == _HOST:
            return "the host"
        return f"device {self._attribute(attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, address)}"

    def _read(self, graph: int) -> GraphNodes:
        nodes: list[Node] = []
        edges: list[Edge] = []
        pending = [graph]
        while pending:
            handles = self._nodes(pending[0])
            indices = {int(handle): len(nodes) + i for i, handle in enumerate(handles)}
            edges.extend(self._edges(pending.pop(0), indices))
            for handle in handles:
                kind = self._call("cuGraphNodeGetType", handle)
                nodes.append(self._node(int(kind), handle))
                if int(kind) == _CHILD_GRAPH:
                    pending.append(int(self._call("cuGraphChildGraphNodeGetGraph", handle)))
        return GraphNodes(nodes, edges)

    def _attribute(self, attribute: Any, address: int) -> int | None:
        status, value = self._cu.cuPointerGetAttribute(attribute, address)
        return None if int(status) else int(value)

    def _nodes(self, graph: int) -> Sequence[Any]:
        _, count = self._call("cuGraphGetNodes", graph)
        if not count:
            return []
        nodes: Sequence[Any] = self._call("cuGraphGetNodes", graph, count)[0]
        return nodes

    def _edges(self, graph: int, indices: dict[int, int]) -> Iterator[Edge]:
        # The bindings (seen in 13.0.3) free the array of edge data before they return views of it.
        get, handle, count = self._library.cuGraphGetEdges_v2, ctypes.c_void_p(graph), _size()
        self._check("cuGraphGetEdges_v2", get(handle, None, None, None, ctypes.byref(count)))
        if not count.value:
            return
        sources, targets = ((ctypes.c_void_p * count.value)() for _ in range(2))
        data = (_EdgeData * count.value)()
        status = get(handle, sources, targets, data, ctypes.byref(count))
        self._check("cuGraphGetEdges_v2", status)
        for source, target, edge in zip(sources, targets, data, strict=True):
            yield Edge(indices[source], indices[target], edge.type == _PROGRAMMATIC)

    def _node(self, kind: int, handle: Any) -> Node:
        name = _KINDS[kind] if kind < len(_KINDS) else f"kind {kind}"
        if name == "kernel":
            return self._kernel(handle)
        if name == "memcpy":
            copy = self._call("cuGraphMemcpyNodeGetParams", handle)
            ends = [_end(copy, "src", "source"), _end(copy, "dst", "destination")]
            return Node(name, words=[word for word in ends if word is not None])
        if name == "memset":
            destination = int(self._call("cuGraphMemsetNodeGetParams", handle).dst)
            return Node(name, words=[Word(destination, "destination", is_address=True)])
        return Node(name, unread=_UNREAD.get(name, ""))

    def _kernel(self, handle: Any) -> Node:
        launch = self._call("cuGraphKernelNodeGetParams", handle)
        function = self._function(int(launch.func), int(launch.kern))
        words, unread = list[Word](), function.unread
        if int(launch.kernelParams):
            words = [*_words_of_array(int(launch.kernelParams), function.parameters)]
        elif int(launch.extra):
            words = [*_words_of_buffer(int(launch.extra))]
            unread = ""
        return Node(
            "kernel",
            function.name,
            grid=(launch.gridDimX, launch.gridDimY, launch.gridDimZ),
            block=(launch.blockDimX, launch.blockDimY, launch.blockDimZ),
            words=words,
            unread=unread,
        )

    def _function(self, func: int, kern: int) -> _Function:
        """Return a kernel's name and layout, from its function or, where that is 0, its kernel."""
        known = self._functions.get((func, kern))
        if known is None:
            kind, handle = ("Func", func) if func else ("Kernel", kern)
            name = self._call(f"cu{kind}GetName", handle) or b"unnamed"
            name = demangle(name.decode(errors="replace"))
            known = _Function(name, *self._layout(kind, handle))
            self._functions[func, kern] = known
        return known

    def _layout(self, kind: str, handle: int) -> tuple[list[tuple[int, int]], str]:
        """Return the offset and size of each parameter, and why not if they cannot be had."""
        get = getattr(self._cu, f"cu{kind}GetParamInfo")
        past_the_end = int(self._cu.CUresult.CUDA_ERROR_INVALID_VALUE)
        parameters: list[tuple[int, int]] = []
        while len(parameters) < _MAX_PARAMETERS:
            status, offset, size = get(handle, len(parameters))
            if int(status) == past_the_end:
                break
            if int(status):
                return [], f"the driver does not tell its parameters: {_status(status)}"
            parameters.append((offset, size))
        return parameters, ""

    def _call(self, name: str, *arguments: Any) -> Any:
        status, *results = getattr(self._cu, name)(*arguments)
        self._check(name, status)
        return results[0] if len(results) == 1 else results

    def _check(self, name: str, status: Any) -> None:
        if int(status):
            raise GraphError(f"the graph could not be read: {name}: {_status(status)}")


@dataclass(frozen=True)
class _Function:
    name: str
    parameters: Sequence[tuple[int, int]]
    unread: str


_size = ctypes.c_size_t


class _EdgeData(ctypes.Structure):
    _fields_ = (
        ("from_port", ctypes.c_ubyte),
        ("to_port", ctypes.c_ubyte),
        ("type", ctypes.c_ubyte),
        ("reserved", ctypes.c_ubyte * 5),
    )


def _status(status: Any) -> str:
    return str(getattr(status, "name", f"CUresult {int(status)}"))


def _words_of_array(array: int, layout: Sequence[tuple[int, int]]) -> Iterator[Word]:
    """Yield what may be addresses in the parameters to which the addresses at `array` lead."""
    pointers = (ctypes.c_void_p * len(layout)).from_address(array)
    for index, ((offset, size), pointer) in enumerate(zip(layout, pointers, strict=True)):
        if pointer is not None:
            for byte, value in aligned_words(offset, ctypes.string_at(pointer, size)):
                yield Word(
                    value, f"parameter {index}, byte {byte}" if byte else f"parameter {index}"
                )


def _words_of_buffer(extra: int) -> Iterator[Word]:
    """Yield what may be addresses in parameters given as one buffer, by pairs of key and value."""
    pairs = dict[int, int]()
    while (key := _read_address(extra)) != 0:
        pairs[key] = _read_address(extra + 8)
        extra += 16
    buffer, size = pairs.get(_EXTRA_BUFFER), pairs.get(_EXTRA_SIZE)
    if buffer and size:
        data = ctypes.string_at(buffer, ctypes.c_size_t.from_address(size).value)
        for byte, value in aligned_words(0, data):
            yield Word(value, f"parameters, byte {byte}")


def _read_address(place: int) -> int:
    return ctypes.c_void_p.from_address(place).value or 0


def _end(copy: Any, end: str, place: str) -> Word | None:
    kind = getattr(copy, f"{end}MemoryType")
    kind = _UNIFIED if kind is None else int(kind)  # None for what the bindings have no name for
    if kind == _ARRAY:
        return None  # a texture's memory, which has no address
    attribute = f"{end}Host" if kind == _HOST else f"{end}Device"
    return Word(int(getattr(copy, attribute)), place, is_address=True)
