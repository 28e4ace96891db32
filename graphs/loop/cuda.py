"""A burst as one launch: a WHILE node whose body is the captured step and the kernel after it."""

from __future__ import annotations

import ctypes
import importlib
import time
import weakref
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch

from ..errors import BurstError
from ..guards import ProcessGuard
from ..inspect.driver import NOT_INSTALLED
from ..inspect.nodes import GraphNodes
from .memory import BurstMemory

_SOURCE = Path(__file__).with_name("advance.cu")
_KERNEL = b"ostinato_advance"
_THREADS = 1024
_ALLOWED = ("kernel", "memcpy", "memset", "empty", "child graph", "conditional")
_POLL_S = 20e-6
_POLLS_PER_QUERY = 50  # of whether the device still works


class WhileLoop:
    """Repeats a captured step on the device; see `BurstLoop`.

    Args:
        graph: the address of the captured `cudaGraph_t`, of which this keeps a copy.
        plan: what the kernel does after each step; see `burst_plan`.
        memory: where it reads limits and writes tokens.
        device: where that is.

    Raises:
        BurstError: when the driver refuses the loop, or cuda-python or NVRTC is missing.
    """

    def __init__(
        self, graph: int, plan: torch.Tensor, memory: BurstMemory, device: torch.device
    ) -> None:
        self._memory = memory
        self._plan = plan  # the graph has its address
        self._device = device
        self._ended = torch.cuda.Event()
        self._cu = _import("driver")
        with torch.cuda.device(device):
            self._kernel = _advance_kernel(device.index)
            self._graph = self._call("cuGraphCreate", 0)
            try:
                self._fill(graph)
                self._executable = self._call("cuGraphInstantiate", self._graph, 0)
            except BaseException:
                self._cu.cuGraphDestroy(self._graph)
                raise
        # Also of a runner that is dropped without `close`.
        self._destroy = weakref.finalize(
            self, _destroy, self._cu, self._executable, self._graph, self._ended, ProcessGuard()
        )
        self._destroy.atexit = False  # the driver may have gone by then

    def launch(self) -> None:
        """Begin a burst on the current stream, where `BurstMemory.start` has been called."""
        stream = torch.cuda.current_stream(self._device)
        with torch.cuda.device(self._device):
            self._call("cuGraphLaunch", self._executable, stream.cuda_stream)
        self._ended.record(stream)

    def wait(self, step: int) -> None:
        """Return when the tokens of `step` are in the host's memory, or the burst has ended.

        Raises:
            BurstError: when the device failed before that.
        """
        polls = 0
        while self._memory.published <= step and not self._memory.done:
            # No call of the driver but now and then: another thread's might hold its lock.
            time.sleep(_POLL_S)
            polls += 1
            if polls % _POLLS_PER_QUERY == 0 and self._has_ended() and not self._memory.done:
                raise BurstError("the burst ended on the device before it had reported its end")

    def abandon(self) -> None:
        """Wait for the end of what `launch` may have begun, after the burst was cancelled."""
        torch.cuda.current_stream(self._device).synchronize()

    def release(self) -> None:
        """Give the graph back to the driver. No burst may be running."""
        self._destroy()

    def _has_ended(self) -> bool:
        try:
            return bool(self._ended.query())
        except RuntimeError as error:
            raise BurstError(f"the burst failed on the device: {error}") from error

    def _fill(self, step: int) -> None:
        """Add the WHILE node, and to its body the step and the kernel."""
        cu = self._cu
        context = self._call("cuCtxGetCurrent")
        # 1 when a burst begins: its first step is always taken.
        assign = int(cu.CU_GRAPH_COND_ASSIGN_DEFAULT)
        handle = self._call("cuGraphConditionalHandleCreate", self._graph, context, 1, assign)
        loop = cu.CUgraphNodeParams()
        loop.type = cu.CUgraphNodeType.CU_GRAPH_NODE_TYPE_CONDITIONAL
        loop.conditional.handle = handle
        loop.conditional.type = cu.CUgraphConditionalNodeType.CU_GRAPH_COND_TYPE_WHILE
        loop.conditional.size = 1
        loop.conditional.ctx = context
        self._call("cuGraphAddNode", self._graph, None, None, 0, loop)
        body = loop.conditional.phGraph_out[0]
        child = self._call("cuGraphAddChildGraphNode", body, None, 0, step)
        values = [
            ctypes.c_uint64(int(handle)),
            *(ctypes.c_uint64(t.data_ptr()) for t in (self._plan, self._memory.control)),
            ctypes.c_uint64(self._memory.ring.data_ptr()),
        ]
        arguments = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
        launch = cu.CUDA_KERNEL_NODE_PARAMS()
        launch.func = self._kernel
        launch.gridDimX = launch.gridDimY = launch.gridDimZ = 1
        launch.blockDimX, launch.blockDimY, launch.blockDimZ = _THREADS, 1, 1
        launch.sharedMemBytes = 0
        launch.kernelParams = ctypes.addressof(arguments)
        self._call("cuGraphAddKernelNode", body, [child], 1, launch)

    def _call(self, name: str, *arguments: Any) -> Any:
        return _call(self._cu, name, *arguments)


def _destroy(
    cu: Any, executable: Any, graph: Any, ended: torch.cuda.Event, process: ProcessGuard
) -> None:
    """Give both back to the driver after the last burst; in a fork they are the parent's."""
    if process.is_fork:
        return
    with suppress(RuntimeError):  # of a device that has failed
        ended.synchronize()
    cu.cuGraphExecDestroy(executable)
    cu.cuGraphDestroy(graph)


def check_body(nodes: GraphNodes, is_pageable: Any) -> None:
    """Refuse a step that cannot be the body of a WHILE node.

    Args:
        nodes: of the step.
        is_pageable: tells of an address whether it is in memory that the device cannot reach.

    Raises:
        BurstError: with the node.
    """
    for index, node in enumerate(nodes.nodes):
        if node.kind not in _ALLOWED:
            raise BurstError(
                f"node {index}, {node}: a step that is repeated on the device consists of kernels, "
                "copies and fills"
            )
        if node.kind == "memcpy":
            for word in node.words:
                if is_pageable(word.value):
                    raise BurstError(
                        f"node {index}, {node}: its {word.place} is pageable memory of the host, "
                        "which the device cannot reach by itself; pin it"
                    )


@cache
def _advance_kernel(device: int) -> Any:
    """Compile the kernel for a device and load it, once in a process."""
    nvrtc, cu = _import("nvrtc"), _import("driver")
    major, minor = torch.cuda.get_device_capability(device)
    source = _SOURCE.read_bytes()
    program = _call(nvrtc, "nvrtcCreateProgram", source, _SOURCE.name.encode(), 0, None, None)
    option = f"--gpu-architecture=compute_{major}{minor}".encode()
    (status,) = nvrtc.nvrtcCompileProgram(program, 1, [option])
    if int(status):
        log = bytearray(_call(nvrtc, "nvrtcGetProgramLogSize", program))
        _call(nvrtc, "nvrtcGetProgramLog", program, log)
        raise BurstError(f"{_SOURCE.name} could not be compiled: {log.decode(errors='replace')}")
    # PTX, in which the driver finds its own function; machine code would have to be linked first.
    code = bytearray(_call(nvrtc, "nvrtcGetPTXSize", program))
    _call(nvrtc, "nvrtcGetPTX", program, code)
    nvrtc.nvrtcDestroyProgram(program)
    module = _call(cu, "cuModuleLoadData", bytes(code))
    return _call(cu, "cuModuleGetFunction", module, _KERNEL)


def _import(name: str) -> Any:
    try:
        return importlib.import_module(f"cuda.bindings.{name}")
    except ImportError as error:
        raise BurstError(NOT_INSTALLED) from error


def _call(library: Any, name: str, *arguments: Any) -> Any:
    status, *results = getattr(library, name)(*arguments)
    if int(status):
        raise BurstError(f"{name}: {getattr(status, 'name', int(status))}")
    return results[0] if len(results) == 1 else results
