"""Launching a captured graph by one call of the driver, where torch has nothing to do beside it."""

from __future__ import annotations

import torch

from .. import _native


class Launch:
    """Replays a graph of torch's on the current stream.

    Torch's own replay takes a guard of the device, looks after its random generators, and has a
    frame of Python and the runtime around the driver's call: twice the time of the call, which a
    busy host pays in every step. None of it is needed for a graph without random numbers, on the
    current device.

    Args:
        graph: instantiated.
        device: of the graph, with its index.
    """

    __slots__ = ("_executable", "_graph", "_index", "_is_direct", "_is_only_device")

    def __init__(self, graph: torch.cuda.CUDAGraph, device: torch.device) -> None:
        self._graph = graph
        self._index = device.index
        self._is_only_device = torch.cuda.device_count() == 1
        # Older versions of torch do not tell it.
        tell = getattr(graph, "raw_cuda_graph_exec", None)
        self._executable: int = 0 if tell is None else tell()
        self._is_direct = False

    @property
    def executable(self) -> int | None:
        """What the driver launches, if that is all there is to do on the current device."""
        return self._executable if self._is_direct else None

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
        stream = torch._C._cuda_getCurrentRawStream(self._index)
        if _native.launch_graph(self._executable, stream):
            self._graph.replay()  # nothing was launched; torch says why

    def _replay_and_see(self) -> None:
        """Replay by torch, which moves its generator on if the graph has random numbers.

        Another thread's may move it at the same time: the next replay sees.
        """
        generator = torch.cuda.default_generators[self._index]
        offset = generator.get_offset()
        self._graph.replay()
        self._is_direct = self._executable != 0 and generator.get_offset() == offset
