"""Launching a captured graph by one call of the driver, where torch has nothing to do beside it."""

from __future__ import annotations

import ctypes

import torch


class Launch:
    """Replays a graph of torch's on the current stream.

    Torch's own replay takes a guard of the device, looks after its random generators, and has a
    frame of Python and the runtime around the driver's call: twice the time of the call, which a
    busy host pays in every step. None of it is needed for a graph without random numbers, on the
    current device.

    Args:
        graph: instantiated.
        device: of the graph, with its index.
        library: libcuda.
    """

    __slots__ = (
        *("_executable", "_graph", "_handle", "_index", "_is_direct", "_is_only_device"),
        *("_launch", "_stream"),
    )

    def __init__(
        self, graph: torch.cuda.CUDAGraph, device: torch.device, library: ctypes.CDLL
    ) -> None:
        self._graph = graph
        self._index = device.index
        self._is_only_device = torch.cuda.device_count() == 1
        self._launch = library.cuGraphLaunch
        # Older versions of torch do not tell it.
        tell = getattr(graph, "raw_cuda_graph_exec", None)
        self._executable = None if tell is None else ctypes.c_void_p(tell())
        self._is_direct = False
        self._handle = 0
        self._stream = ctypes.c_void_p(0)

    def __call__(self) -> None:
        """Launch the graph; the stream is the caller's current one of the graph's device.

        Raises:
            RuntimeError: torch's, when the driver refuses.
        """
        if not self._is_direct:
            self._replay_and_see()
            return
        if not (self._is_only_device or torch._C._cuda_getDevice() == self._index):
            self._graph.replay()  # the default stream is another one for each device
            return
        handle = torch._C._cuda_getCurrentRawStream(self._index)
        if handle != self._handle:
            self._handle, self._stream = handle, ctypes.c_void_p(handle)
        if self._launch(self._executable, self._stream):
            self._graph.replay()  # nothing was launched; torch says why

    def _replay_and_see(self) -> None:
        """Replay by torch, which moves its generator on if the graph has random numbers.

        Another thread's may move it at the same time: the next replay sees.
        """
        generator = torch.cuda.default_generators[self._index]
        offset = generator.get_offset()
        self._graph.replay()
        self._is_direct = self._executable is not None and generator.get_offset() == offset
