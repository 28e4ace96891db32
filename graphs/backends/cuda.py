"""CUDA graphs through torch: one stream, one memory pool, and recovery from failed captures."""

from __future__ import annotations

import ctypes
import gc
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from itertools import pairwise
from typing import cast

import torch

from .._native import CaptureGuard, FastReplay, is_capturing
from ..buffer_spec import BufferSpec
from ..buffers import BatchView
from ..errors import BusyError
from ..failures import Failure, Trace
from ..graph import BurstLoop, Graph, ReplayTimer
from ..guards import only_capture, run_lock_of
from ..inspect.cuda import CudaInspector, PoolHandle
from ..inspect.driver_log import DriverLog
from ..inspect.op_trace import OperatorWatch
from ..loop.cuda import WhileLoop, check_body
from ..loop.memory import BurstMemory
from ..loop.plan import encode
from ..loop.rules import BurstRules
from ..outputs import Outputs, Step
from ..process_group import CaptureGroup
from .launch import Launch
from .library_workspaces import LibraryWorkspaces
from .pool_views import pool_views
from .streams import CallerOrder, EventTimer, StreamScope

# Calls of other threads (a data loader's, a monitor's) must not break a capture of this one.
_CAPTURE_MODE = "thread_local"
_CU_STREAM_CAPTURE_STATUS_INVALIDATED = 2
_TIMED_REPLAYS, _TIMED_US = 3, 10_000  # at most, after one that is not timed; ranks take all


def _nothing() -> None:
    """Do what a capture without a step does, or note no reasons."""


class CudaBackend:
    """Captures on a stream of its own, and replays on the caller's.

    Args:
        device: a CUDA device with its index.
        pool: memory pool of all graphs, from `torch.cuda.graph_pool_handle()`. Runners that share
            one must share the stream, for which a pool keeps its memory.
            To capture into it again, drop the outputs of earlier runs first. By default each series
            of captures gets a new pool.
        stream: a stream of the device, not its default stream. By default a new one.

    Raises:
        TypeError, ValueError: when an argument is of the wrong kind or on another device, or the
            pool is used on another stream already.
    """

    def __init__(
        self, device: torch.device, pool: PoolHandle | None, stream: torch.cuda.Stream | None
    ) -> None:
        _check_pool(pool)
        _check_stream(stream, device)
        self.name = torch.cuda.get_device_name(device)
        self._device = device
        self._given_pool = pool
        self._anchor: torch.cuda.CUDAGraph | None = None
        self._stream = torch.cuda.Stream(device) if stream is None else stream
        self.run_lock = run_lock_of(pool, self._stream.cuda_stream)
        self._order = CallerOrder(device, self.run_lock)
        self._scope = StreamScope(self._stream, self._order)
        self.inspector = CudaInspector(device, pool)
        self._libraries = LibraryWorkspaces(
            self.inspector.pool_blocks, self._capture_empty, device, self._stream
        )
        self._library = ctypes.CDLL("libcuda.so.1")
        self._log = DriverLog(self._library)
        self._watch_again = False
        self._reasons: tuple[str, ...] = ()

    def check_idle(self) -> None:
        """Refuse to work inside a capture of the caller's, which it would break."""
        if is_capturing(torch._C._cuda_getCurrentRawStream(self._device.index)):
            raise BusyError(
                "the current stream is being captured: call the runner outside of that capture"
            )

    def fast_replay(self) -> FastReplay:
        """Return what repeats runs on the caller's stream."""
        several = torch.cuda.device_count() > 1
        return FastReplay(
            torch._C._cuda_getCurrentRawStream,
            self._device.index,
            torch._C._cuda_getDevice if several else None,
        )

    def follow(self) -> bool:
        """Let the caller's stream wait for that of the last run, if it is another."""
        return self._order.follow()

    def passed(self) -> None:
        """Mark the caller's stream, which somebody else made."""
        self._order.passed()

    def scope(self) -> AbstractContextManager[None]:
        """Make the backend's stream current, ordered with the caller's stream both ways."""
        return self._scope

    def synchronize(self) -> None:
        """Wait for the backend's stream."""
        self._stream.synchronize()

    def is_idle(self) -> bool:
        """Ask the backend's stream; one that has failed does nothing more."""
        try:
            return bool(self._stream.query())
        except RuntimeError:
            return True

    def prepare_captures(self, *, into_pool: bool) -> None:
        """Take a pool, and return memory that only the warm-up needed to the driver."""
        if not into_pool:
            self.inspector.pool = self._given_pool or torch.cuda.graph_pool_handle()
            if self._anchor is None:
                self._anchor = self._capture_empty()
            gc.collect()  # dead reference cycles may hold device memory
        self._libraries.begin()
        if not into_pool:
            torch.cuda.empty_cache()

    def finish_captures(self) -> None:
        """Leave the workspaces of libraries to the graphs alone."""
        self._libraries.end()

    def capture(self, step: Step, batch: BatchView) -> Graph:
        """Capture one call of the step and instantiate the graph."""
        # Kept, a graph is instantiated apart from the end of its capture: whatever fails up to
        # that end is mended by the guard, and nothing after it needs to be.
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        self._watch_again, self._reasons = False, ()
        self._log.mark()
        try:
            with self._capture_guard(graph, self.inspector.pool):
                try:
                    outputs = Outputs.of(step(batch), batch)
                finally:
                    self._watch_again = not self._is_valid()
        except RuntimeError:
            self._watch_again = True
            raise
        started = time.perf_counter()
        graph.instantiate()
        instantiate_ms = 1e3 * (time.perf_counter() - started)
        launch = Launch(graph, self._device)
        return _CudaGraph(graph, launch, self._views_of(outputs), instantiate_ms)

    def failure(self, step: Step, batch: BatchView) -> Failure:
        """Return the driver's log of the failed capture, and watch the step unless Python failed.

        Torch and the driver raise RuntimeError, or nothing until the capture ends.
        """
        trace = self.trace(step, batch) if self._watch_again else None
        return Failure(self._reasons, trace)

    def trace(self, step: Step, batch: BatchView) -> Trace | None:
        """Watch the step in a capture into a pool of its own, which is then given back."""
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        watch = OperatorWatch(self._is_valid, torch.cuda.is_current_stream_capturing)
        error = None
        with self._capture_guard(graph, torch.cuda.graph_pool_handle(), keep=False):
            try:
                with watch:
                    step(batch)
            except Exception as raised:
                error = raised
            trace = watch.finish(error)
        torch.cuda.empty_cache()
        return trace

    def replay_us(self, graph: Graph, group: CaptureGroup) -> float | None:
        """Time replays on the backend's stream by events, on whatever the buffers hold."""
        # Several ranks replay equally often, however long it takes each: a replay's collectives
        # need all of them. For the same reason they meet before this one waits.
        at_once = 1 if group.size == 1 else _TIMED_REPLAYS
        times: list[float] = []
        graph.replay()
        while len(times) < _TIMED_REPLAYS and sum(times) < _TIMED_US:
            marks = [_mark(self._stream)]
            for _ in range(at_once):
                graph.replay()
                marks.append(_mark(self._stream))
            group.agree("the timing of replays")
            marks[-1].synchronize()
            times += [1e3 * start.elapsed_time(end) for start, end in pairwise(marks)]
        return statistics.median(times)

    def release(self, graphs: list[Graph]) -> None:
        """Wait for all streams, destroy the graphs and their outputs, then free the pool."""
        # The caller's stream may still be reading outputs which the caller has dropped.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        self._order.wait_for_last(self._stream)
        self._stream.synchronize()
        self._order.forget()
        while graphs:
            graphs.pop().release()
        # A pool without graphs stays reserved until the allocator's cache is emptied.
        _empty_cache()

    def replay_timer(self) -> ReplayTimer:
        """Return pairs of events."""
        return EventTimer(self._device)

    def loop(
        self,
        graph: Graph,
        batch: BatchView,
        specs: Mapping[str, BufferSpec],
        rules: BurstRules,
        memory: BurstMemory,
    ) -> BurstLoop:
        """Return a graph of a WHILE node around a copy of the captured one."""
        driver, handle = self.inspector.driver, cast("_CudaGraph", graph).handle
        check_body(driver.read(handle), lambda address: driver.location_of(address) is None)
        plan = encode(rules, specs, batch, graph.outputs, memory)
        return WhileLoop(handle, plan, memory, self._device)

    def leave_pool(self) -> None:
        """Give back a pool of the runner's own."""
        self._libraries.release()
        if self._given_pool is None:
            self.close()

    def close(self) -> None:
        """Let go of the pool, a caller's too, which goes when no output of it is held."""
        if self._anchor is not None:
            self._anchor = None
            _empty_cache()

    def _views_of(self, outputs: Outputs) -> Outputs:
        return pool_views(outputs, self.inspector.owned(outputs), self._anchor)

    def _capture_guard(
        self, graph: torch.cuda.CUDAGraph, pool: PoolHandle | None, *, keep: bool = True
    ) -> CaptureGuard:
        """Return what captures its `with` block into a graph of the pool.

        Torch's functions are those beneath its Python: a signal handler may raise in any frame.
        """
        torchs, stream = torch._C._CUDAGraph, self._stream
        handle = cast("torch.cuda._POOL_HANDLE", pool)
        return CaptureGuard(
            stream.cuda_stream,
            select=partial(
                torch._C._cuda_setStream,
                stream_id=stream.stream_id,
                device_index=stream.device_index,
                device_type=stream.device_type,
            ),
            begin=partial(
                torchs.capture_begin, graph, pool=handle, capture_error_mode=_CAPTURE_MODE
            ),
            end=partial(torchs.capture_end, graph),
            reset=partial(torchs.reset, graph),
            note=self._note_reasons if keep else _nothing,
            keep=keep,
        )

    def _note_reasons(self) -> None:
        self._reasons = self._log.since_mark()

    def _is_valid(self) -> bool:
        """Return whether the capture of the backend's stream can still succeed."""
        status, stream = ctypes.c_int(), ctypes.c_void_p(self._stream.cuda_stream)
        error = self._library.cuStreamIsCapturing(stream, ctypes.byref(status))
        return error == 0 and status.value != _CU_STREAM_CAPTURE_STATUS_INVALIDATED

    def _capture_empty(self, allocate: Callable[[], None] = _nothing) -> torch.cuda.CUDAGraph:
        """Return a graph of nothing in the pool, in whose capture memory is allocated.

        A pool whose last graph is destroyed is refused by torch from then on (seen in 2.11: an
        assertion in its host allocator). This one keeps a pool usable while graphs in it come and
        go, and mapped while somebody holds outputs in it.
        """
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        with _no_warning_of_empty_graphs(), self._capture_guard(graph, self.inspector.pool):
            allocate()
        return graph


class _CudaGraph:
    def __init__(
        self, graph: torch.cuda.CUDAGraph, launch: Launch, outputs: Outputs, instantiate_ms: float
    ) -> None:
        self.outputs = outputs
        self.instantiate_ms = instantiate_ms
        self.loop: BurstLoop | None = None
        self._graph = graph
        self._launch = launch
        self.replay: Callable[[], None] = launch

    @property
    def executable(self) -> int | None:
        return self._launch.executable

    @property
    def handle(self) -> int:
        return self._graph.raw_cuda_graph()

    def release(self) -> None:
        if self.loop is not None:
            self.loop.release()
            self.loop = None
        self._graph.reset()
        self.replay = self._graph.replay  # which refuses; the driver would take what is gone


def _mark(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record(stream)
    return event


def _empty_cache() -> None:
    """Give the allocator's cache back to the driver, unless another thread is capturing.

    The allocator cannot do it then. What stays reserved goes when it is next emptied.
    """
    with suppress(BusyError), only_capture():
        torch.cuda.empty_cache()


@contextmanager
def _no_warning_of_empty_graphs() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The CUDA Graph is empty")
        yield


def _check_pool(pool: PoolHandle | None) -> None:
    if pool is None:
        return
    if not isinstance(pool, tuple) or len(pool) != 2 or not all(isinstance(i, int) for i in pool):
        raise TypeError(f"pool: got {pool!r}, expected what torch.cuda.graph_pool_handle() returns")


def _check_stream(stream: torch.cuda.Stream | None, device: torch.device) -> None:
    if stream is None:
        return
    if not isinstance(stream, torch.cuda.Stream):
        raise TypeError(f"stream: got {type(stream).__name__}, expected a torch.cuda.Stream")
    if stream.device != device:
        raise ValueError(f"stream: got one of {stream.device}, expected one of {device}")
    if stream == torch.cuda.default_stream(device):
        raise ValueError("stream: got the default stream, which cannot be captured")
