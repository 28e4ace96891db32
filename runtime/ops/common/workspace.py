"""Scratch memory that launches share: zero before its first use, a graph's for as long as it lives.

A kernel leaves the counters in its workspace at zero for the next launch, so that two launches may
share one only if they never run at once:

- Launches that are not captured: those of one stream.
- Captured launches: those of one stream in graphs of one memory pool, which torch's rules forbid to
  replay at once. Graphs of different pools may be replayed at once, whichever stream they were
  captured on. Graphs without a pool share with no other.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Hashable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch

from ... import _C

_CU_STREAM_CAPTURE_MODE_RELAXED = 2
_ALIGNMENT = 16  # bytes
_NO_POOL = (0, 0)  # the pool of all memory that is in none


@dataclass
class _Captured:
    """A workspace of captured launches.

    Attributes:
        owner: device, stream and pool, or capture, whose launches share it.
        memory: [bytes] uint8.
        holds: of the graphs that have its address.
    """

    owner: Hashable
    memory: torch.Tensor
    holds: list[_C.GraphHold] = field(default_factory=list)


_every: weakref.WeakSet[Workspaces] = weakref.WeakSet()


class Workspaces:
    """The workspaces of one kind of kernel.

    They grow by being made anew, and are taken from torch's caching allocator, outside of the pool
    of any capture. Not thread-safe beyond what the interpreter's lock gives: two threads that use
    one stream at once race in the kernels anyway.

    Args:
        least_bytes: the size of any workspace, at least.
        margin: how much larger one is made than the launch that asks for it needs, as a factor:
            other launches of the same capacities may need a little more.
    """

    def __init__(self, least_bytes: int = 0, margin: float = 1.0) -> None:
        self._least_bytes = least_bytes
        self._margin = margin
        self._eager: dict[tuple[int, int], torch.Tensor] = {}  # by device and stream
        self._captured: list[_Captured] = []
        # Of the last capture of each device and stream: its id, and what its launches share.
        self._latest: dict[tuple[int, int], tuple[int, _Captured]] = {}
        _every.add(self)

    def get(self, device: int, stream: int, needed: int) -> torch.Tensor:
        """Return [bytes] uint8, at least `needed`, for a launch on torch's current stream.

        Args:
            device: the index of the current device.
            stream: the handle of its current stream.
            needed: bytes.

        Raises:
            torch.OutOfMemoryError: when a new one does not fit.
        """
        place = (device, stream)
        capture = _C.capture_of(stream)
        if not capture:
            memory = self._eager.get(place)
            if memory is None or memory.numel() < needed:
                memory = self._grow(place, needed)
            return memory
        latest = self._latest.get(place)
        if latest is None or latest[0] != capture or latest[1].memory.numel() < needed:
            latest = self._latest[place] = (capture, self._join(place, capture, needed))
        return latest[1].memory

    def _grow(self, place: tuple[int, int], needed: int) -> torch.Tensor:
        self.drop_unused()
        device = place[0]
        made = self._make(device, needed)
        if place in self._eager:
            # Launches that are under way use the one that is given back here.
            torch.cuda.current_stream(device).synchronize()
        self._eager[place] = made
        return made

    def _join(self, place: tuple[int, int], capture: int, needed: int) -> _Captured:
        """Return what launches of a capture share, which its graph holds from now on."""
        self.drop_unused()
        device, stream = place
        owner = (device, stream, _pool_of_capture(device) or capture)
        hold = _C.GraphHold(stream)
        for known in self._captured:
            if known.owner == owner and known.memory.numel() >= needed:
                known.holds.append(hold)
                return known
        memory = self._make(device, needed)
        memory.kept_for_graphs = True  # type: ignore[attr-defined]  # audits of graphs look for it
        made = _Captured(owner, memory, [hold])
        self._captured.append(made)
        return made

    def drop_unused(self) -> None:
        """Give back the workspaces of graphs that are gone."""
        for captured in self._captured:
            captured.holds = [hold for hold in captured.holds if hold.is_alive]
        self._captured = [captured for captured in self._captured if captured.holds]
        self._latest = {place: latest for place, latest in self._latest.items() if latest[1].holds}

    def _make(self, device: int, needed: int) -> torch.Tensor:
        size = max(self._least_bytes, int(self._margin * needed))
        # In a thread of its own: what the caller's allocates may be meant for a pool, also while it
        # only warms a step up, and a capture may forbid it to allocate or to wait.
        with ThreadPoolExecutor(1, "ostinato-workspace") as thread:
            return thread.submit(_zeros, device, size).result()


def drop_unused_workspaces() -> None:
    """Give back the workspaces of graphs that are gone, of all kinds of kernels.

    Each kind does so when one of its launches needs another workspace. Torch's caching allocator
    keeps the memory.
    """
    for workspaces in tuple(_every):
        workspaces.drop_unused()


def given(workspace: torch.Tensor, needed: int) -> torch.Tensor:
    """Return a caller's workspace [bytes] uint8, if a launch that needs so many bytes can use it.

    Raises:
        ValueError: when it is too small, or not where kernels can use it.
    """
    if workspace.numel() < needed:
        raise ValueError(f"workspace: got {workspace.numel()} bytes, expected at least {needed}")
    if workspace.data_ptr() % _ALIGNMENT:
        raise ValueError(
            f"workspace: got address {workspace.data_ptr()}, expected a multiple of {_ALIGNMENT}"
        )
    return workspace


def _zeros(device: int, size: int) -> torch.Tensor:
    """Return [size] uint8 that are zero already, without touching a capture of another thread."""
    mode = ctypes.c_int(_CU_STREAM_CAPTURE_MODE_RELAXED)
    ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    with torch.cuda.device(device):
        # Torch hands out a limited number of streams in turn, any of which may be captured.
        stream = torch.cuda.Stream()
        while _C.capture_of(stream.cuda_stream):
            stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            made = torch.zeros(size, dtype=torch.uint8, device=f"cuda:{device}")
        # A kernel may count its CTAs there before it waits for the kernel in front of it.
        stream.synchronize()
    return made


def _pool_of_capture(device: int) -> tuple[int, int] | None:
    """Return the memory pool of the capture that the current stream is in; None where it has none.

    Torch tells it only of memory: of a byte that the capture allocates, and gives back at once.
    """
    if torch.cuda.get_allocator_backend() != "native":
        return None
    address = torch.cuda.caching_allocator_alloc(1, device)  # no tensor: that might be filled
    torch.cuda.caching_allocator_delete(address)
    for segment in torch.cuda.memory_snapshot():
        start, size = segment["address"], segment["total_size"]
        if segment["device"] == device and start <= address < start + size:
            pool = tuple(segment["segment_pool_id"])
            return None if pool == _NO_POOL else pool
    return None
