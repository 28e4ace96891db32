"""The ranks of a model: processes that start by torchrun, or from a process group."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch
from torch import distributed

from ostinato.graphs.arguments import as_seconds
from ostinato.graphs.errors import RankError
from ostinato.graphs.process_group import shared_store

from .channel import Channel
from .processes import WatchedProcess, identity
from .watchdog import Watchdog

DEFAULT_TIMEOUT_S = 60.0
_DEVICE_TIMEOUT_S = 600.0  # of NCCL's collectives: a rank may compile while the others wait
_LAST_WORDS_S = 5.0  # for the others to leave, or to read of a failure


def world_size() -> int:
    """Return the number of processes that torchrun has started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank_here() -> int:
    """Return the number of this process among them."""
    return int(os.environ.get("RANK", "0"))


class Ranks:
    """The processes that serve a model together, each of which makes one on the same group.

    A context manager: an error that leaves its block is told to all other ranks, which then raise
    RankError with this rank's number and message; leaving it without one on rank 0 ends `follow` of
    the others. Whatever happens to one of them, all other ranks end within `timeout_s`: by an
    error, or where something does not come back (a collective, a device) by the end of the process,
    with exit code 1 and a line on standard error.

    Args:
        group: a process group of all ranks, for the collectives of a device.
        timeout_s: how long a rank may be silent, or in one step, until it is given up: a silent one
            after half of it.

    Attributes:
        group, timeout_s: as above.
        rank, size: of the group.
        channel: to the other ranks.
        watchdog: over them.

    Raises:
        TypeError, ValueError: for a group of another type, or a timeout that is not positive.
        RankError: when the other ranks do not come.
    """

    def __init__(
        self, group: distributed.ProcessGroup, *, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> None:
        if not isinstance(group, distributed.ProcessGroup):
            raise TypeError(f"group: got {type(group).__name__}, expected a ProcessGroup")
        if as_seconds("timeout_s", timeout_s) <= 0:
            raise ValueError(f"timeout_s: got {timeout_s}, expected a positive number")
        self.group = group
        self.timeout_s = timeout_s
        self.rank, self.size = group.rank(), group.size()
        self.owns_group = False
        store = _connection(shared_store(group))
        store.set(f"alive/{self.rank}", '["", 0, false]')
        self.channel = Channel(store, self.rank, self.size, timeout_s)
        who = self.channel.meet("the start", identity())
        processes = {r: WatchedProcess(told) for r, told in enumerate(who) if r != self.rank}
        self.watchdog = Watchdog(_connection(store), self.rank, processes, timeout_s, _store_rank())
        self.channel.watchdog = self.watchdog
        self._closed = False

    @property
    def leads(self) -> bool:
        """Whether this is rank 0, which the caller drives."""
        return self.rank == 0

    def share(self, at: str, value: object) -> Any:
        """Return rank 0's value on every rank; the others' are not looked at.

        Args:
            at: where, in words; the same for all.
            value: that JSON can write.
        """
        return self.channel.meet(at, value, timeout_s=max(self.timeout_s, _DEVICE_TIMEOUT_S))[0]

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Tell the others of an error of the block, or raise theirs, where it was first."""
        try:
            yield
        except BaseException as error:
            failure = self._instead_of(error)
            if failure is None:
                raise
            raise failure from error

    @contextmanager
    def ended_by_rank_0(self) -> Iterator[None]:
        """Leave it to rank 0 to end this process, while it follows.

        Ctrl-C in a terminal and a launcher's SIGTERM come to all ranks at once: rank 0 may have
        texts to show, or clients to answer, for which it needs the others.
        """
        previous = {}
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                previous[number] = signal.signal(number, _ignore)
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def on_failure(self, listener: Callable[[RankError], None]) -> None:
        """Have a thread call a listener when a rank is lost."""
        self.watchdog.on_failure(listener)

    def close(self) -> None:
        """End the ranks that follow, if this is rank 0, and leave; again does nothing.

        After a failure this process may still be stuck at its exit, in a library: end it by
        `os._exit`.
        """
        if self._closed:
            return
        self._closed = True
        broken = self.watchdog.failure is not None
        try:
            if self.leads and not broken:
                self.channel.send(b"")
            if not self.leads:
                self.watchdog.close()
            # Rank 0 holds the store, where no launcher does: it is the last to go.
            elif self.size > 1:
                self.watchdog.wait_for_others(_LAST_WORDS_S)
        except RankError:
            broken = True
        finally:
            self.watchdog.close()
        if self.owns_group and not broken:
            distributed.destroy_process_group(self.group)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        failure = None
        try:
            if error is not None and not isinstance(error, SystemExit):
                failure = self._instead_of(error)
        finally:
            self.close()
        if failure is not None:
            raise failure from error

    def _instead_of(self, error: BaseException) -> RankError | None:
        """Tell the others of an error, and return what is raised instead, if anything."""
        failure = self.watchdog.blame(error)
        # Within one block there may be another.
        same = isinstance(error, RankError) and str(error) == str(failure)
        return None if same else failure


def start_ranks(device: torch.device, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> Ranks:
    """Return the ranks that torchrun has started, with a process group for the device.

    Args:
        device: of this rank; its type is the same on all of them.
        timeout_s: of `Ranks`.

    Raises:
        ValueError: without torchrun's environment (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT).
        RankError: when the other ranks do not come.
    """
    missing = [
        name
        for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        if name not in os.environ
    ]
    if missing:
        raise ValueError(f"{', '.join(missing)}: not set, expected the environment of torchrun")
    # Where a rank is lost a gloo collective comes back by this, if not by a closed connection.
    seconds = 0.75 * timeout_s
    options: dict[str, Any] = {"backend": "gloo"}
    if device.type == "cuda":
        torch.cuda.set_device(device)
        seconds = max(timeout_s, _DEVICE_TIMEOUT_S)
        options = {"backend": "cpu:gloo,cuda:nccl", "device_id": device}
    try:
        distributed.init_process_group(timeout=timedelta(seconds=seconds), **options)
    except distributed.DistError as error:
        raise RankError(f"the ranks did not come together: {error}") from error
    group = distributed.group.WORLD
    assert group is not None
    ranks = Ranks(group, timeout_s=timeout_s)
    ranks.owns_group = True
    return ranks


def _connection(store: Any) -> Any:
    """Return a connection of its own to a store, where it is one of a server's."""
    return store.clone() if hasattr(store, "clone") else store


def _store_rank() -> int | None:
    """Return the rank that holds the store; None where torchrun does."""
    return None if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else 0


def _ignore(_number: int, _frame: object) -> None:
    pass
