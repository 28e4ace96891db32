"""A CUDA driver made of Python objects, and a backend that records graphs without a GPU."""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from types import SimpleNamespace

from ostinato.graphs.backends.cpu import CpuBackend
from ostinato.graphs.errors import GraphError
from ostinato.graphs.failures import Failure, Trace
from ostinato.graphs.inspect.allocations import Allocation, Allocations
from ostinato.graphs.inspect.driver import _KINDS, GraphDriver
from ostinato.graphs.inspect.inspector import NoInspector
from ostinato.graphs.inspect.nodes import GraphNodes


class Status(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_NOT_SUPPORTED = 801


class Attribute(IntEnum):
    CU_POINTER_ATTRIBUTE_MEMORY_TYPE = 2
    CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL = 9


@dataclass
class FakeNode:
    kind: str
    name: bytes = b""
    parameters: Sequence[tuple[int, bytes]] = ()  # offset and bytes of each
    as_buffer: bool = False  # parameters given by `extra`
    as_kernel: bool = False  # a CUkernel of a library, and no CUfunction
    copy: dict[str, int] = field(default_factory=dict)
    destination: int = 0
    child: "FakeGraph | None" = None
    layout_status: Status = Status.CUDA_ERROR_INVALID_VALUE


@dataclass
class FakeGraph:
    nodes: Sequence[FakeNode]
    edges: Sequence[tuple[int, int, bool]] = ()


class FakeCuda:
    """Stands for `cuda.bindings.driver` and for libcuda: keeps graphs and gives them handles."""

    CUresult = Status
    CUpointer_attribute = Attribute

    def __init__(self) -> None:
        self._objects: dict[int, object] = {}
        self._handles: dict[int, int] = {}
        self._memory: list[object] = []
        self.ranges: list[tuple[int, int, int, int]] = []  # memory type, device, start, size
        self.calls: list[str] = []

    def reader(self) -> GraphDriver:
        return GraphDriver(self, self)

    def handle(self, thing: object) -> int:
        key = self._handles.setdefault(id(thing), 1000 + 16 * len(self._handles))
        self._objects[key] = thing
        return key

    def cuGraphGetNodes(self, graph, count=0):
        nodes = self._objects[graph].nodes
        return Status(0), [self.handle(node) for node in nodes[:count]], len(nodes)

    def cuGraphGetEdges_v2(self, graph, sources, targets, data, count):
        graph = self._objects[graph.value]
        if sources is not None:
            for i, (source, target, programmatic) in enumerate(graph.edges):
                sources[i] = self.handle(graph.nodes[source])
                targets[i] = self.handle(graph.nodes[target])
                data[i].from_port = data[i].type = int(programmatic)
        count._obj.value = len(graph.edges)
        return 0

    def cuGraphNodeGetType(self, node):
        return Status(0), _KINDS.index(self._objects[node].kind)

    def cuGraphChildGraphNodeGetGraph(self, node):
        return Status(0), self.handle(self._objects[node].child)

    def cuGraphKernelNodeGetParams(self, handle):
        node = self._objects[handle]
        array = extra = 0
        if node.as_buffer:
            size = max((offset + len(data) for offset, data in node.parameters), default=0)
            buffer = ctypes.create_string_buffer(size)
            for offset, data in node.parameters:
                buffer[offset : offset + len(data)] = data
            length = ctypes.c_size_t(size)
            entries = [2, ctypes.addressof(length), 1, ctypes.addressof(buffer), 0]
            extra = self._array(entries, buffer, length)
        else:
            buffers = [ctypes.create_string_buffer(data, len(data)) for _, data in node.parameters]
            array = self._array([ctypes.addressof(buffer) for buffer in buffers], *buffers)
        self.calls.append("params")
        return Status(0), SimpleNamespace(
            func=0 if node.as_kernel else handle,
            kern=handle if node.as_kernel else 0,
            **{f"gridDim{axis}": size for axis, size in zip("XYZ", (132, 2, 1), strict=True)},
            **{f"blockDim{axis}": size for axis, size in zip("XYZ", (384, 1, 1), strict=True)},
            kernelParams=array,
            extra=extra,
        )

    def cuFuncGetName(self, function):
        self.calls.append("name")
        return Status(0), self._objects[function].name

    def cuKernelGetName(self, kernel):
        return self.cuFuncGetName(kernel)

    def cuFuncGetParamInfo(self, function, index):
        node = self._objects[function]
        if index >= len(node.parameters):
            return node.layout_status, None, None
        offset, data = node.parameters[index]
        return Status(0), offset, len(data)

    def cuKernelGetParamInfo(self, kernel, index):
        return self.cuFuncGetParamInfo(kernel, index)

    def cuGraphMemcpyNodeGetParams(self, node):
        ends = {"srcHost": 0, "srcDevice": 0, "dstHost": 0, "dstDevice": 0}
        return Status(0), SimpleNamespace(**{**ends, **self._objects[node].copy})

    def cuGraphMemsetNodeGetParams(self, node):
        return Status(0), SimpleNamespace(dst=self._objects[node].destination)

    def cuPointerGetAttribute(self, attribute, address):
        for kind, device, start, size in self.ranges:
            if start <= address < start + size:
                return Status(0), {2: kind, 9: device}[attribute]
        return Status.CUDA_ERROR_INVALID_VALUE, None

    def _array(self, addresses, *kept):
        array = (ctypes.c_void_p * len(addresses))(*addresses)
        self._memory += [array, *kept]
        return ctypes.addressof(array)


class RecordingBackend(CpuBackend, NoInspector):
    """The CPU's backend and its inspector, which finds the same nodes in every graph."""

    def __init__(self, nodes: GraphNodes) -> None:
        super().__init__()
        self.inspector = self
        self.recorded = nodes
        self.present: list[Allocation] = []
        self.foreign: list[Allocation] = []  # labelled with where they are
        self.unreadable: str | None = None
        self.fails_to_read: str | None = None
        self.on_capture = lambda: None
        self.failed: Callable[[], Failure] = Failure
        self.traced: Trace | None = None

    def capture(self, step, batch):
        self.on_capture()
        return super().capture(step, batch)

    def failure(self, step, batch):
        return self.failed()

    def trace(self, step, batch):
        return self.traced

    def check_readable(self) -> None:
        if self.unreadable is not None:
            raise GraphError(self.unreadable)

    def nodes(self, graph):
        if self.fails_to_read is not None:
            raise GraphError(self.fails_to_read)
        return self.recorded

    def allocations(self):
        return tuple(self.present)

    def location_of(self, address):
        known = Allocations(self.foreign).find(address)
        return None if known is None else known.label

    def replay_us(self, graph, group):
        graph.replay()
        return 12.5
