"""The ranks of a model: processes that start by torchrun, or from a process group."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from datetime import timedelta
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch import distributed

from ostinato.graphs.arguments import as_seconds
from ostinato.graphs.errors import RankError
from ostinato.graphs.process_group import describe, shared_store

from ..ops import Communicator, GroupCommunicator
from ..ops.collective.peers import PeerCommunicator, connect_peers
from ..rank_environment import number_of, world_size
from .channel import Channel
from .processes import WatchedProcess, identity
from .watchdog import Watchdog

T = TypeVar("T")

DEFAULT_TIMEOUT_S = 60.0
_GIVE_UP = 0.75  # of the timeout: a collective waits so long, and no rank is silent for so long
_DEVICE_TIMEOUT_S = 600.0  # of NCCL's collectives: a rank may compile while the others wait
_LAST_WORDS_S = 5.0  # for the others to leave, or to read of a failure
_BACKLOG = 2048  # connections that may wait for the store
_LONGEST_S = 1e6  # that torch takes for a timeout, too
_STORE_S = 30.0
_MEETING_ENDS_S = 3.0  # beyond the timeout, after which a meeting ends by itself, and names ranks


def rank_here() -> int:
    """Return the number of this process among them."""
    return number_of("RANK", "0")


def _checked_timeout(timeout_s: float) -> float:
    if not 0 < as_seconds("timeout_s", timeout_s) < _LONGEST_S:
        raise ValueError(
            f"timeout_s: got {timeout_s}, expected a positive number of at most {_LONGEST_S:g}"
        )
    return timeout_s


class Ranks:
    """The processes that serve a model together, each of which makes one on the same group.

    A context manager: an error that leaves its block is told to all other ranks, which then raise
    RankError with this rank's number and message; leaving it without one on rank 0 ends `follow` of
    the others. Whatever happens to one of them, all other ranks end within `timeout_s`: by an
    error, or where something does not come back (a collective, a device) by the end of the process,
    with exit code 1 and a line on standard error.

    Made by `start_ranks`, or `Ranks.of_group`.

    Args:
        store: of all ranks.
        rank: this one.
        size: how many there are.
        timeout_s: how long a rank may be silent, or in one step, until it is given up: a silent one
            after half of it.

    Attributes:
        rank, size, timeout_s: as above.
        group: the process group, for collectives of a device.
        channel: to the other ranks.
        watchdog: over them.

    Raises:
        TypeError, ValueError: for a timeout that is not positive.
        RankError: when the other ranks do not come.
    """

    group: distributed.ProcessGroup

    def __init__(self, store: Any, rank: int, size: int, timeout_s: float) -> None:
        self.timeout_s = _checked_timeout(timeout_s)
        self.rank, self.size = rank, size
        self._owns_group = False
        self._closed = False
        self._peers: list[PeerCommunicator] = []
        self.channel = Channel(store, rank, size, timeout_s)
        own = [identity(), {"WORLD_SIZE": size, "timeout_s": timeout_s}]

        def start() -> list[dict[str, Any]]:
            store.set(f"alive/{rank}", '["", 0, false]')
            told = self.channel.meet("the start", own)
            self.channel.require_alike([options for _, options in told])
            return [who for who, _ in told]

        who = _from_store(start, timeout_s, more_s=_MEETING_ENDS_S)
        processes = {r: WatchedProcess(told) for r, told in enumerate(who) if r != rank}
        self.watchdog = Watchdog(_connection(store), rank, processes, timeout_s, _store_rank())
        self.channel.watchdog = self.watchdog

    @staticmethod
    def of_group(group: distributed.ProcessGroup, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> Ranks:
        """Return the ranks of a process group, which stays the caller's to destroy.

        Args:
            group: of all ranks. Its own timeout is that of its collectives, where the device does
                not end them: it should be no longer than `timeout_s`.
            timeout_s: of `Ranks`.

        Raises:
            TypeError, ValueError, RankError: as `Ranks`, or for a group of another type.
        """
        if not isinstance(group, distributed.ProcessGroup):
            raise TypeError(f"group: got {type(group).__name__}, expected a ProcessGroup")
        store = _connection(shared_store(group))
        ranks = Ranks(store, group.rank(), group.size(), timeout_s)
        ranks._attach(group)
        return ranks

    def _attach(self, group: distributed.ProcessGroup) -> None:
        self.group = group
        self.watchdog.end_captures_in(_connection(shared_store(group)))

    @property
    def leads(self) -> bool:
        """Whether this is rank 0, which the caller drives."""
        return self.rank == 0

    def connect(self, device: torch.device) -> Communicator:
        """Return what the models of the ranks sum with: on GPUs of one host, peer memory.

        Once a rank is lost a GPU waits for it no longer, and `check` raises what that has left.

        Args:
            device: of this rank's model.

        Raises:
            RankError: when the other ranks do not do the same.
        """
        with self.guarded():
            if device.type != "cuda":
                return GroupCommunicator(self.group, device)
            seconds = _GIVE_UP * self.timeout_s
            communicator = connect_peers(
                self.group, device, timeout_s=seconds, exchange=self._exchange
            )
        if isinstance(communicator, PeerCommunicator):
            self._peers.append(communicator)
            self.on_failure(lambda failure: communicator.stop(str(failure)))
        return communicator

    def _exchange(self, numbers: Sequence[int]) -> list[list[int]]:
        """Return the numbers of each rank; who does not come is named."""
        return self.channel.meet("peer memory", list(numbers))

    def check(self) -> None:
        """Check that no collective has failed whose work the device has ended.

        Raises:
            CommunicatorError: when one has: nothing that was computed since is to be used.
        """
        for communicator in self._peers:
            communicator.check()

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
        self.watchdog.leave()
        broken = self.watchdog.failure is not None
        try:
            if self.leads and not broken:
                self.channel.send(b"")
            if not self.leads:
                self.watchdog.close()
            # Rank 0 holds the store, where no launcher does: it is the last to go.
            else:
                self.watchdog.wait_for_others(_LAST_WORDS_S)
        except RankError:
            broken = True
        finally:
            self.watchdog.close()
        if self._owns_group and not broken:
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
        TypeError, ValueError: as `Ranks`, or without torchrun's environment (RANK, WORLD_SIZE,
            MASTER_ADDR, MASTER_PORT).
        RankError: when the other ranks do not come.
    """
    _checked_timeout(timeout_s)
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in names if name not in os.environ]
    if missing:
        raise ValueError(f"{', '.join(missing)}: not set, expected the environment of torchrun")
    rank, size = rank_here(), world_size()
    if not rank < size:
        raise ValueError(f"RANK: got {rank}, expected less than WORLD_SIZE, {size}")
    store = _store(rank, timeout_s)
    # Before the group, so that a rank that does not come to it is known by name.
    ranks = Ranks(_connection(store), rank, size, timeout_s)
    # Where a rank is lost a gloo collective comes back by this, if not by a closed connection.
    seconds = _GIVE_UP * timeout_s
    options: dict[str, Any] = {"backend": "gloo"}
    if device.type == "cuda":
        torch.cuda.set_device(device)
        seconds = max(timeout_s, _DEVICE_TIMEOUT_S)
        options = {"backend": "cpu:gloo,cuda:nccl", "device_id": device}
    options |= {"store": store, "rank": rank, "world_size": size}
    try:
        with ranks.guarded():
            distributed.init_process_group(timeout=timedelta(seconds=seconds), **options)
            group = distributed.group.WORLD
            assert group is not None
            ranks._attach(group)
    except BaseException:
        ranks.close()
        raise
    ranks._owns_group = True
    return ranks


def _store(rank: int, timeout_s: float) -> Any:
    """Return the store that torchrun holds, or else rank 0."""
    holder = _store_rank()
    host, port = os.environ["MASTER_ADDR"], number_of("MASTER_PORT")
    if not port < 1 << 16:
        raise ValueError(f"MASTER_PORT: got {port}, expected less than 65536")

    def make() -> Any:
        return distributed.TCPStore(  # type: ignore[attr-defined]  # it is public
            host,
            port,
            is_master=rank == holder,
            # Longer than it is waited for here: at its end torch prints where in its code it was.
            timeout=timedelta(seconds=timeout_s + _STORE_S),
            wait_for_workers=False,
            master_listen_fd=_listen(host, port) if rank == holder else None,
        )

    try:
        store = _from_store(make, timeout_s)
        store.set_timeout(timedelta(seconds=timeout_s))
    except (distributed.DistError, OSError) as error:
        failures = {} if holder is None else {holder: "does not hold a store of the group"}
        what = describe(failures) or "torchrun does not hold a store of the group"
        # Behind the first line torch says where in its own code it was.
        raise RankError(f"{what}: {str(error).partition(chr(10))[0]}", failures) from None
    # torchrun starts all of them anew when one ends, on the same store.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return distributed.PrefixStore(f"ostinato/attempt {attempt}", store)  # type: ignore[attr-defined]


def _from_store(call: Callable[[], T], timeout_s: float, *, more_s: float = 0.0) -> T:
    """Return what a call that needs the store returns, or raise what it raises.

    It runs in a thread of its own, which is left behind where it does not come back: torch waits in
    C++ for a store that has accepted a connection and is silent. Ctrl-C is heard meanwhile.

    Args:
        call: of the store.
        timeout_s: how long to wait for it.
        more_s: and how much longer.

    Raises:
        RankError: naming who holds the store, when the call has not come back by then.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="start of ranks", daemon=True).start()
    wait([future], timeout_s + more_s)
    if future.done():
        return future.result()
    holder = _store_rank()
    where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    what = f"does not answer at {where} in {timeout_s:g} s, where the store of the group should be"
    failures = {} if holder is None else {holder: what}
    raise RankError(describe(failures) or f"torchrun {what}", failures)


def _listen(host: str, port: int) -> int | None:
    """Return a listening socket for a store; None for an address of IPv6 alone.

    The store's only thread asks for the name of whoever connects. On a socket for IPv4 and IPv6, as
    torch makes it, /etc/hosts does not answer that, and no rank is served until a name server does.
    """
    try:
        socket.getaddrinfo(host, port, socket.AF_INET, socket.SOCK_STREAM)
    except socket.gaierror:
        return None
    return socket.create_server(("", port), family=socket.AF_INET, backlog=_BACKLOG).detach()


def _connection(store: Any) -> Any:
    """Return a connection of its own to a store, where it is one of a server's."""
    return store.clone() if hasattr(store, "clone") else store


def _store_rank() -> int | None:
    """Return the rank that holds the store; None where torchrun does."""
    return None if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else 0


def _ignore(_number: int, _frame: object) -> None:
    pass
