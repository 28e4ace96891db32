"""The compiled part of the graph manager (csrc/graphs/). Addresses and streams are integers."""

from collections.abc import Callable
from typing import Any

def is_capturing(stream: int) -> bool:
    """Return whether launches on the stream are being captured into a CUDA graph."""

def launch_graph(executable: int, stream: int) -> int:
    """Launch an instantiated graph of the current device, and return the driver's CUresult.

    Raises:
        RuntimeError: without a CUDA driver; an `executable` that is none crashes.
    """

def note_fork() -> None:
    """Tell every `FastReplay` that this is a fork of the process that it learnt its run in."""

class RunCounts:
    """How a graph was used since the last capture."""

    def __init__(self) -> None: ...
    def add(self, n: int, replayed: bool = True) -> None:
        """Note a run of `n` rows, by a replay or by a call of the step."""

    def read(self) -> tuple[int, int, int]:
        """Return replays, calls of the step, and rows, all of one moment."""

class RunLock:
    """One lock that callers in any thread take, one at a time.

    Attributes:
        owner, what: of the call that has it, or had it last.
        last_stream: the handle of the stream of the last call; -1 where there was none, or it is
            not sure to be there still.
    """

    last_stream: int
    @property
    def owner(self) -> object: ...
    @property
    def what(self) -> str: ...
    def __init__(self) -> None: ...
    def take(self, owner: object, what: str, timeout_s: float = 0.0) -> bool:
        """Take the run lock; False if it is not free.

        Other threads are waited for so many seconds, with the GIL released.
        """

    def forget(self) -> None:
        """Let every `FastReplay` of this lock forget its runs; the caller holds the lock."""

    def end(self) -> None:
        """Give the run lock back."""

class RunLockGuard:
    """Holds a run lock inside of a `with` statement; no exception of a signal handler loses it.

    Args:
        run_lock, owner, what, timeout_s: as `RunLock.take` says.
        is_run: else every `FastReplay` forgets its runs.
        check: called when the run lock has been taken; it is given back if this raises.
        refuse: called with owner and what when the run lock is not free; it must raise.
    """

    def __init__(
        self,
        run_lock: RunLock,
        owner: object,
        what: str,
        timeout_s: float = 0.0,
        *,
        is_run: bool = False,
        check: Callable[[], None] | None = None,
        refuse: Callable[[object, str], object],
    ) -> None: ...
    def __enter__(self) -> RunLockGuard: ...
    def __exit__(self, *error: object) -> None: ...
    def detach(self) -> None:
        """Let the run lock outlast the statement: any thread may `end` it, or wait for that."""

    def end(self) -> None:
        """Give the run lock back, if it is still had; again does nothing."""

class CaptureGuard:
    """Captures a graph of torch's inside of a `with` statement; no exception leaves it half done.

    Args:
        stream: the handle of the stream that is captured.
        select: makes it torch's current one.
        begin, end, reset: of the graph. None of them, nor `select`, may have a frame of Python.
        note: called when the capture has failed, before it is abandoned.
        keep: else the capture is abandoned in any case.

    Raises:
        RuntimeError: when the stream is unusable after a failed capture.
    """

    def __init__(
        self,
        stream: int,
        *,
        select: Callable[[], object],
        begin: Callable[[], object],
        end: Callable[[], object],
        reset: Callable[[], object],
        note: Callable[[], object],
        keep: bool,
    ) -> None: ...
    def __enter__(self) -> CaptureGuard: ...
    def __exit__(self, *error: object) -> None: ...

class PendingCloses:
    """Counts the calls that wait to close a runner, each inside of a `with` statement.

    While there are any (then this is true), no run is repeated in the run lock.
    """

    def __init__(self, run_lock: RunLock) -> None: ...
    def __bool__(self) -> bool: ...
    def __enter__(self) -> None: ...
    def __exit__(self, *error: object) -> None: ...

class FastReplay:
    """Repeats runs without a frame of Python, while nothing but runs is done in their run lock.

    Args:
        current_stream, device: on CUDA a function of the device's index that returns the handle of
            the caller's stream, and that index; without them runs are in program order.
        current_device: a function that returns the current device's index, where it may be another.

    Attributes:
        runs_to_look: runs until declared memory must be looked at.
    """

    runs_to_look: int

    def __init__(
        self,
        current_stream: Callable[[int], int] | None = None,
        device: int | None = None,
        current_device: Callable[[], int] | None = None,
    ) -> None: ...
    def run(self, owner: object, n: int, inputs: object, variant: object) -> Any:
        """Run once more: take the run lock, stage, launch, count, and return the outputs.

        Returns:
            None, when nothing has been done, because this run is not known; the run lock is taken,
            or somebody waits to close a runner; the caller's stream is another than that of the
            last call, or is being captured; this is a fork; or `look` finds something.
        """

    def learn(
        self,
        *,
        run_lock: RunLock,
        n: int,
        variant: object,
        batch_size: int,
        stager: object,
        executable: int,
        replay: Callable[[], None],
        counts: RunCounts,
        look: Callable[[], object],
        runs_per_look: int,
        rows: tuple[Any, list[tuple[Any, Any, Any, Any]]],
        remake: Callable[[int], Any],
    ) -> None:
        """Take note of a run that has just been made, in the place of another if there are many.

        There is room for 128 runs, four for each `n` modulo 32.

        Args:
            run_lock: its caller holds it, and it is the same until everything is forgotten.
            n: rows.
            variant: of them; runs are found by both.
            batch_size: of the graph.
            stager: its `stage(inputs, n, batch_size)` writes the inputs.
            executable: the graph, or 0 where `replay` must be called.
            replay: called also when the driver refuses, to say why.
            counts: of the graph.
            look: returns None unless memory has moved.
            runs_per_look: how often it is called.
            rows: the outputs, and each tensor of them with its shape, strides and address; outputs
                in a dict are copied.
            remake: returns the outputs of `n` rows where a tensor no longer has these.
        """
