"""What must not happen to captured graphs: forks, moved memory, two calls at once."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import NoReturn
from weakref import WeakSet, WeakValueDictionary

import torch

from . import _native
from .declared_memory import DeclaredMemory, stored
from .errors import BusyError, ForkedError

# Torch keeps track of one capture at a time in a process, in whichever thread.
_capturing = _native.RunLock()


def _forget_captures() -> None:
    """Take back the place: the thread that held it was not copied into a fork."""
    global _capturing
    _capturing = _native.RunLock()


os.register_at_fork(after_in_child=_forget_captures)


def only_capture() -> _native.RunLockGuard:
    """Return what holds the process's one place for a series of captures, in a `with` statement.

    The statement raises BusyError when it is taken, also by this thread.
    """
    return _native.RunLockGuard(_capturing, None, "capture", refuse=_refuse_capture)


def _refuse_capture(owner: object, what: str) -> NoReturn:
    raise BusyError("another runner is being captured: one at a time in a process")


class ProcessGuard:
    """Tells the process it was made in from forks of it, to which no GPU memory belongs.

    Args:
        what: is guarded, for messages.

    Attributes:
        is_fork: whether this is a child of the process that it was made in. Noted when a child
            begins, since asking the system in every run would be felt.
    """

    def __init__(self, what: str = "runner") -> None:
        self._what = what
        self._process = os.getpid()
        self.is_fork = False
        _guards.add(self)

    def check(self) -> None:
        """Raise ForkedError in a child."""
        if self.is_fork:
            raise ForkedError(
                f"the {self._what} was made in process {self._process}, and this is a fork of it: "
                f"the device cannot be used across a fork; make the {self._what} in this process, "
                "or start processes with the method 'spawn'"
            )


_WATCHED_PER_RUN = 2  # tensors of the declared memory, on average
_MOST_RUNS_PER_LOOK = 8

_guards: WeakSet[ProcessGuard] = WeakSet()


def _note_fork() -> None:
    _native.note_fork()
    for guard in _guards:
        guard.is_fork = True


os.register_at_fork(after_in_child=_note_fork)


class MemoryWatch:
    """Notices when declared memory is not where it was when the watch was told to `note` it.

    Values may change in place. Each parameter and buffer is looked up by its name in the module
    that had it, so that one which was replaced is noticed; a module that was replaced is not.

    Attributes:
        runs_per_look: how often runs must `look`. A tensor whose turn comes is not in the CPU's
            caches, nor its page among those it knows: alone it took a seventh of all that a run
            does itself, and those beside it are near then.
    """

    def __init__(self, memory: DeclaredMemory | None) -> None:
        self._memory = memory
        self._places: list[_Place] = []
        self._next = 0
        self.runs_per_look = _MOST_RUNS_PER_LOOK

    def note(self) -> None:
        """Take the places where everything is now for the right ones."""
        self._places = [] if self._memory is None else list(_places(self._memory))
        self._next = 0
        # Of few tensors, one that has moved is found by the next run.
        runs = max(len(self._places) // (2 * _WATCHED_PER_RUN), 1)
        self.runs_per_look = min(runs, _MOST_RUNS_PER_LOOK) if self._places else _MOST_RUNS_PER_LOOK

    def look(self) -> str | None:
        """Look at a few tensors on behalf of the runs since the last look; as `moved`."""
        return self.moved(self.runs_per_look * _WATCHED_PER_RUN)

    def moved(self, count: int | None = None) -> str | None:
        """Return the name of a tensor that has moved; None if none has.

        Args:
            count: look at so many at most, from where the last look ended; by default at all.
        """
        start = 0 if count is None else self._next
        stop = None if count is None else start + count
        for look, address, name in self._places[start:stop]:
            if look() != address:
                return name
        self._next = 0 if stop is None or stop >= len(self._places) else stop
        return None


# What tells where a tensor is, where it was, and what it is called. A tuple, since runs unpack it.
_Place = tuple[Callable[[], int | None], int, str]


def _places(memory: DeclaredMemory) -> Iterator[_Place]:
    for name, holder in memory.items():
        if isinstance(holder, torch.nn.Module):
            for path, module in holder.named_modules():
                prefix = f"{path}." if path else ""
                for tensors in (module._parameters, module._buffers):
                    for key, tensor in tensors.items():
                        if tensor is not None:
                            label = f"memory[{name!r}], {prefix}{key}"
                            look, find = partial(_address, tensors, key), partial(tensors.get, key)
                            yield from _places_of(tensor, look, find, label)
            continue
        for index, tensor in enumerate([holder] if isinstance(holder, torch.Tensor) else holder):
            label = f"memory[{name!r}], tensor {index}"
            # The method itself: a run finds little of all this in the CPU's caches.
            yield from _places_of(tensor, tensor.data_ptr, partial(_itself, tensor), label)


def _places_of(
    tensor: torch.Tensor,
    look: Callable[[], int | None],
    find: Callable[[], torch.Tensor | None],
    label: str,
) -> Iterator[_Place]:
    """Yield where a tensor is, by `look`, or what it wraps, in what `find` then returns."""
    for part, held in enumerate(stored(tensor)):
        yield (
            look if held is tensor else partial(_address_within, find, part),
            held.data_ptr(),
            label,
        )


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _address(tensors: Mapping[str, torch.Tensor | None], key: str) -> int | None:
    tensor = tensors.get(key)
    return None if tensor is None else tensor.data_ptr()


def _address_within(find: Callable[[], torch.Tensor | None], part: int) -> int | None:
    tensor = find()
    held = None if tensor is None else next(itertools.islice(stored(tensor), part, None), None)
    return None if held is None else held.data_ptr()


class RunLock(_native.RunLock):
    """Lets one runner at a time work in a memory pool, since a replay overwrites its outputs.

    Args:
        stream: on which all of them capture, so that they share the pool's memory.

    Attributes:
        last: the stream of the last call, None before the first; `last_handle` is the driver's.
        last_event: its end, where the stream is foreign and may be gone at the next call.
    """

    def __init__(self, stream: int = 0) -> None:
        super().__init__()
        self.stream = stream
        self.last: torch.cuda.Stream | None = None
        self.last_handle = -1
        self.last_event: torch.cuda.Event | None = None
        self.last_is_foreign = False

    def hold(
        self,
        owner: object,
        what: str,
        timeout_s: float = 0.0,
        *,
        is_run: bool = False,
        check: Callable[[], None] | None = None,
    ) -> _native.RunLockGuard:
        """Return what holds the run lock for the call `what` of `owner`, in a `with` statement.

        The statement raises BusyError when it is taken, also by this thread.

        Args:
            owner: a runner.
            what: its call, for messages.
            timeout_s: wait so long for other threads.
            is_run: after any other call `FastReplay` repeats no run until it has learnt it anew.
            check: called with the run lock taken, which is given back if this raises.
        """
        return _native.RunLockGuard(
            self, owner, what, timeout_s, is_run=is_run, check=check, refuse=self._refuse
        )

    def _refuse(self, owner: object, what: str) -> NoReturn:
        who = "the runner" if self.owner is owner else "another runner of the same pool"
        raise BusyError(
            f"{what}: {who} is in the middle of {self.what}; "
            "one call at a time, and none from inside the step",
            busy=self.owner,
        )


_run_locks: WeakValueDictionary[tuple[int, int], RunLock] = WeakValueDictionary()
_making_run_locks = threading.Lock()  # the first two runners of a pool may be made in two threads


def run_lock_of(pool: tuple[int, int] | None, stream: int) -> RunLock:
    """Return what all living runners of `pool` share; a new one for None.

    Raises:
        ValueError: when they capture on another stream, for which a pool keeps memory of its own.
    """
    if pool is None:
        return RunLock(stream)
    with _making_run_locks:
        run_lock = _run_locks.get(pool)
        if run_lock is None:
            run_lock = _run_locks[pool] = RunLock(stream)
    if run_lock.stream != stream:
        raise ValueError(
            f"pool: got {pool}, which another runner uses on another stream; give both the same "
            "stream, or each its own pool"
        )
    return run_lock
