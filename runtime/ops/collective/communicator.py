"""Sums and concatenations over the ranks of a tensor-parallel group.

Every rank calls the same ops in the same order with tensors of the same shape and dtype. A sum is
made in rank order, in fp32, and rounded once: NCCL's own all-reduce chooses its order by size and
topology, and with it the bits of a token would depend on the number of tokens beside it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from threading import Barrier, BrokenBarrierError, Lock
from typing import TypeVar
from weakref import WeakValueDictionary

import torch
from torch import distributed

from ..common import checks
from ..common.torch_library import register

Result = TypeVar("Result")

# Newer versions of torch warn of the second name, older ones lack the first.
_gather = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor

DEFAULT_TIMEOUT_S = 600.0  # as that of a process group: a rank may compile kernels meanwhile

_numbers = count()
_known: WeakValueDictionary[str, Communicator] = WeakValueDictionary()


class CommunicatorError(RuntimeError):
    """A rank did not take part in a collective, or its process group failed."""


class Communicator(ABC):
    """One rank's access to the others of its group.

    Attributes:
        rank: of this one, from 0.
        size: how many ranks there are.
        device: where the tensors of its collectives are.
        name: by which ops registered with torch refer to it, as torch names process groups; it
            names this communicator for as long as it lives, in this process.
    """

    def __init__(self, rank: int, size: int, device: torch.device) -> None:
        checks.integer("size", size, least=1)
        checks.integer("rank", rank, least=0)
        if rank >= size:
            raise ValueError(f"rank: got {rank} of {size} ranks, expected 0 to {size - 1}")
        self.rank, self.size, self.device = rank, size, device
        self.name = f"communicator{next(_numbers)}"
        _known[self.name] = self

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of x [T, H] over all ranks: see `ops.all_reduce`."""
        return all_reduce(x, self)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Return the columns of x [T, n] of all ranks, [T, size·n]: see `ops.all_gather`."""
        return all_gather(x, self)

    @abstractmethod
    def gather_into(self, out: torch.Tensor, x: torch.Tensor) -> None:
        """Write x of every rank into out [size, *x.shape], in rank order.

        Both are dense, of one dtype, on `device`.

        Raises:
            CommunicatorError: when a rank does not take part.
        """

    def reduce_into(self, out: torch.Tensor, x: torch.Tensor) -> None:
        """Write the sum of x [T, H] over all ranks, in rank order, into out [T, H]."""
        parts = torch.empty((self.size, *x.shape), dtype=x.dtype, device=x.device)
        self.gather_into(parts, x.contiguous())
        sum_in_order(parts, out)

    def stop(self, problem: str) -> None:  # noqa: B027  # what has nothing to stop is whole
        """End what ranks of this process wait for, or will, where that is possible.

        It is not in a process group, whose collectives end by its own timeout.

        Args:
            problem: why, for messages.
        """


class GroupCommunicator(Communicator):
    """The ranks of a process group of torch: gloo on CPUs, NCCL on GPUs.

    A rank that does not come ends the others when the group's own timeout has passed.

    Args:
        group: of `torch.distributed`; None is its default group.
        device: where the tensors are; by default the CPU for gloo, and torch's current GPU for
            NCCL.

    Raises:
        RuntimeError: when torch.distributed has no such group yet.
    """

    def __init__(
        self,
        group: distributed.ProcessGroup | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        self.group = distributed.group.WORLD if group is None else group
        if self.group is None:
            raise RuntimeError(
                "group: got None without a default group, expected a call of "
                "torch.distributed.init_process_group before"
            )
        if device is None:
            on_gpu = "nccl" in distributed.get_backend(self.group)
            device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else "cpu"
        super().__init__(self.group.rank(), self.group.size(), torch.device(device))

    def gather_into(self, out: torch.Tensor, x: torch.Tensor) -> None:
        # As bytes: backends know few dtypes, and need not know them for this.
        try:
            _gather(_bytes_of(out), _bytes_of(x), group=self.group)
        except RuntimeError as error:
            raise CommunicatorError(
                f"rank {self.rank} of {self.size} could not gather {list(x.shape)} {x.dtype}: "
                f"{error}"
            ) from error


class _Meeting:
    """Where the threads of one process exchange tensors."""

    def __init__(self, size: int, timeout_s: float) -> None:
        self.barrier = Barrier(size, timeout=timeout_s)
        self.given: list[torch.Tensor | None] = [None] * size
        self.timeout_s = timeout_s
        self.problem: str | None = None
        self._lock = Lock()

    def fail(self, problem: str) -> None:
        with self._lock:
            self.problem = self.problem or problem
        self.barrier.abort()

    def wait(self, rank: int) -> None:
        try:
            self.barrier.wait()
        except BrokenBarrierError:
            said = f"a rank did not come within {self.timeout_s:g} s, or another gave up"
            raise CommunicatorError(
                f"rank {rank} of {self.barrier.parties} waits in vain: {self.problem or said}"
            ) from None


class _LocalCommunicator(Communicator):
    """A rank that is a thread of this process."""

    def __init__(self, rank: int, meeting: _Meeting) -> None:
        super().__init__(rank, meeting.barrier.parties, torch.device("cpu"))
        self.meeting = meeting

    def stop(self, problem: str) -> None:
        self.meeting.fail(problem)

    def gather_into(self, out: torch.Tensor, x: torch.Tensor) -> None:
        meeting = self.meeting
        meeting.given[self.rank] = x
        meeting.wait(self.rank)
        given = [part for part in meeting.given if part is not None]
        unlike = [part for part in given if part.shape != x.shape or part.dtype != x.dtype]
        if unlike:
            meeting.fail(
                f"rank {self.rank} has {list(x.shape)} {x.dtype}, another "
                f"{list(unlike[0].shape)} {unlike[0].dtype}"
            )
        else:
            torch.stack(given, out=out)
        meeting.wait(self.rank)  # x of this rank is read until then


def local_communicators(size: int, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> list[Communicator]:
    """Return communicators of ranks that are threads of this process, in rank order, on the CPU.

    Their results have the bits of processes'. Each is used by one thread at a time, all of them at
    once: see `run_ranks`.

    Args:
        size: how many ranks.
        timeout_s: how long a rank waits for the others in a collective, above 0.

    Raises:
        TypeError, ValueError: naming the argument.
    """
    checks.integer("size", size, least=1)
    checks.number("timeout_s", timeout_s)
    if timeout_s <= 0:
        raise ValueError(f"timeout_s: got {timeout_s}, expected a number above 0")
    meeting = _Meeting(size, timeout_s)
    return [_LocalCommunicator(rank, meeting) for rank in range(size)]


def run_ranks(
    communicators: Sequence[Communicator], function: Callable[[Communicator], Result]
) -> list[Result]:
    """Call a function in a thread of each local rank; return the results in rank order.

    Modes of torch that belong to a thread, such as `torch.inference_mode`, are the function's to
    set.

    Args:
        communicators: all of one call of `local_communicators` or `local_peers`.
        function: of a rank's communicator.

    Raises:
        Exception: the first that a rank raised; the others end as soon as they wait for it.
    """
    raised: list[BaseException] = []

    def call(communicator: Communicator) -> Result:
        try:
            return function(communicator)
        except BaseException as error:
            raised.append(error)
            problem = f"rank {communicator.rank} failed: {type(error).__name__}: {error}"
            for each in communicators:
                each.stop(problem)
            raise

    with ThreadPoolExecutor(len(communicators), "ostinato-rank") as threads:
        results = [threads.submit(call, communicator) for communicator in communicators]
    if raised:
        raise raised[0]
    return [result.result() for result in results]


def all_reduce(
    x: torch.Tensor,
    communicator: Communicator,
    *,
    out: torch.Tensor | None = None,
    stream: checks.Stream = None,
) -> torch.Tensor:
    """Add x of all ranks: in rank order, in fp32 from rank 0's on, rounded once to x's dtype.

    The results of all ranks have the same bits, and those of a row do not depend on the others.

    Args:
        x: [T, H] bf16, fp16 or fp32, of the same shape and dtype on every rank.
        communicator: of this rank.
        out: [T, H] of x's dtype, written and returned; allocated when None. It may be x.
        stream: see `ostinato.ops`.

    Returns:
        The sum [T, H] of x's dtype.

    Raises:
        TypeError, ValueError: naming the argument, before anything is sent.
        CommunicatorError: when a rank does not take part.
    """
    check_shared(x, communicator)
    if out is not None:
        checks.output("out", out, (x.dtype,), x.shape, x.device)
    with checks.launch_stream(stream, x.device):
        if out is None:
            out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        _all_reduce_op(x, communicator.name, out)
    return out


def all_gather(
    x: torch.Tensor,
    communicator: Communicator,
    *,
    stream: checks.Stream = None,
) -> torch.Tensor:
    """Return the columns of x of all ranks beside each other, in rank order.

    Args:
        x: [T, n] bf16, fp16 or fp32, of the same shape and dtype on every rank.
        communicator: of this rank.
        stream: see `ostinato.ops`.

    Returns:
        [T, size·n] of x's dtype, dense.

    Raises:
        TypeError, ValueError: naming the argument, before anything is sent.
        CommunicatorError: when a rank does not take part.
    """
    check_shared(x, communicator)
    with checks.launch_stream(stream, x.device):
        out = torch.empty(
            (x.size(0), communicator.size * x.size(1)), dtype=x.dtype, device=x.device
        )
        _all_gather_op(x, communicator.name, out)
    return out


def check_shared(x: torch.Tensor, communicator: Communicator) -> None:
    """Check a rank's share [T, H] and its communicator."""
    if not isinstance(communicator, Communicator):
        raise TypeError(f"communicator: got {type(communicator).__name__}, expected a Communicator")
    checks.tensor("x", x, checks.FLOAT_DTYPES, ("T", "H"), communicator.device)
    checks.not_empty("x", x, "H")
    checks.int32_sizes("x", x.shape, "T", "H")


def communicator_of(name: str) -> Communicator:
    """Return the communicator of a name.

    Raises:
        ValueError: when none of this process that still lives has it.
    """
    found = _known.get(name)
    if found is None:
        raise ValueError(
            f"communicator: got {name!r}, expected the name of one that lives in this process"
        )
    return found


def sum_in_order(parts: torch.Tensor, out: torch.Tensor) -> None:
    """Write the sum of parts [size, T, H] into out [T, H]: fp32, from part 0 on, rounded once."""
    total = parts[0].to(torch.float32, copy=True)
    for part in parts[1:]:
        total += part
    out.copy_(total)


def _all_reduce(x: torch.Tensor, communicator: str, out: torch.Tensor) -> None:
    if x.numel():
        communicator_of(communicator).reduce_into(out, x)


def _all_gather(x: torch.Tensor, communicator: str, out: torch.Tensor) -> None:
    if not x.numel():
        return
    ranks = communicator_of(communicator)
    parts = torch.empty((ranks.size, *x.shape), dtype=x.dtype, device=x.device)
    ranks.gather_into(parts, x.contiguous())
    out.view(x.size(0), ranks.size, x.size(1)).copy_(parts.transpose(0, 1))


def _bytes_of(x: torch.Tensor) -> torch.Tensor:
    return x.view(-1).view(torch.uint8)


_all_reduce_op = register(
    "all_reduce(Tensor x, str communicator, Tensor(a!) out) -> ()", _all_reduce
)
_all_gather_op = register(
    "all_gather(Tensor x, str communicator, Tensor(a!) out) -> ()", _all_gather
)
