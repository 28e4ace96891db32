"""Ranks with access to each other's memory: GPUs of one host, or ranks that share one GPU."""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable, Sequence
from functools import partial
from hashlib import sha256
from threading import Barrier, BrokenBarrierError
from typing import Any

import torch
from torch import distributed
from torch.nn import functional

from ...jit.loader import load
from ..common import checks, pdl
from ..common.device import address_of, current_stream, device_index, gpu, on_device, runs
from . import collective_cuda as cuda
from .communicator import (
    DEFAULT_TIMEOUT_S,
    Communicator,
    CommunicatorError,
    GroupCommunicator,
)

# What every rank says, in rank order, of what this one says.
Exchange = Callable[[Sequence[int]], list[list[int]]]

DEFAULT_REGION_BYTES = 32 << 20  # a prompt's chunk of 2048 rows of 16 KB, of another rank
_REGIONS = 3
_STOPPED = 0x100  # as in csrc/collective/params.h
_CONTROL = struct.Struct("<8QQ4I")  # CollectiveControl there
_MOST_TIMEOUT_S = 1e9


class PeerCommunicator(Communicator):
    """A rank on a GPU that others write to, and that writes to theirs, with kernels of ours.

    A rank waits for the others on its GPU, for as long as `timeout_s`. Then, or after `stop`, what
    it has not received is NaN, later collectives do not wait, and `check` raises.

    Graphs that were captured with it use its memory: it must live as long as they do.
    `connect_peers` and `local_peers` make them.

    Args:
        rank: of this one.
        buffers: addresses of all ranks' buffers, in rank order, as this rank's GPU knows them.
        memory: this rank's buffer, [3·region bytes] uint8.
        meet: waits for all other ranks, on the host.
        timeout_s: how long to wait for another rank, above 0.
        shared: among how many ranks the GPU is.
    """

    def __init__(
        self,
        rank: int,
        buffers: Sequence[int],
        memory: torch.Tensor,
        meet: Callable[[], object],
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        shared: int = 1,
    ) -> None:
        super().__init__(rank, len(buffers), memory.device)
        self.timeout_s = _checked_timeout(timeout_s)
        self._buffers, self._memory, self._meet = tuple(buffers), memory, meet
        self._region = memory.numel() // _REGIONS // cuda.VECTOR
        self._shared = shared
        # Read and written by the GPU, too: stop, error.
        self._host = _host_words()
        self._control = torch.empty(_CONTROL.size, dtype=torch.uint8, device=memory.device)
        self._clear()

    def _clear(self) -> None:
        """Forget all launches; the ranks meet before the next."""
        self._host.zero_()
        addresses = (*self._buffers, *[0] * (cuda.MOST_RANKS - self.size))
        state = _CONTROL.pack(*addresses, self._host.data_ptr(), 0, 0, 0, 0)
        self._control.copy_(torch.frombuffer(bytearray(state), dtype=torch.uint8))
        self._memory.fill_(0xFF)
        torch.cuda.synchronize(self.device)

    def reset(self) -> None:
        """Begin anew after an error: called by all ranks, whose GPUs have nothing left to do.

        Raises:
            CommunicatorError: when a rank does not come.
        """
        torch.cuda.synchronize(self.device)
        self._meet()
        self._clear()
        self._meet()

    def keep(self, mapped: object) -> None:
        """Keep what maps the memory of other ranks for as long as this lives."""
        self._mapped = mapped

    def stop(self, problem: str) -> None:
        """Have the GPU wait for no other rank any more; called by any thread."""
        self._host[0] = 1

    def check(self) -> None:
        """Raise what a collective of this rank left, as far as the GPU has got.

        Results are to be used only if this raises nothing after the work that gave them has ended.

        Raises:
            CommunicatorError: naming the rank that was waited for in vain.
        """
        error = int(self._host[1])
        if error == _STOPPED:
            raise CommunicatorError(f"rank {self.rank} of {self.size} was told to stop waiting")
        if error:
            raise CommunicatorError(
                f"rank {error - 1} did not come to a collective within {self.timeout_s:g} s, in "
                f"which rank {self.rank} of {self.size} waited for it"
            )

    def gather_into(self, out: torch.Tensor, x: torch.Tensor) -> None:
        elements, vector = x.numel(), cuda.VECTOR // x.element_size()
        if elements % vector == 0 and x.data_ptr() % cuda.VECTOR == 0:
            self._launch_gather(out.view(self.size, -1), x.view(1, -1))
            return
        # Whole vectors, the last of which ends with zeros.
        padded = functional.pad(x.reshape(1, -1), (0, -elements % vector))
        parts = torch.empty((self.size, padded.numel()), dtype=x.dtype, device=x.device)
        self._launch_gather(parts, padded)
        out.view(self.size, -1).copy_(parts[:, :elements])

    def _launch_gather(self, out: torch.Tensor, x: torch.Tensor) -> None:
        """Gather x [1, n], whole vectors, into out [size, n]."""
        width = cuda.width_of(x.numel(), cuda.VECTOR // x.element_size())
        rows = x.view(-1, width)
        outs = out.view(self.size, -1, width)
        for part in self._launches_of(rows, gathers=True):
            taken = slice(part.first, part.first + part.count)
            self._launch(
                cuda.collective_kernel("gather", self.size, x.dtype, x.dtype),
                part,
                k=width,
                out_rank_stride=outs.stride(0),
                **cuda.arguments_of(x=rows[taken], out=outs[0, taken]),
            )

    def reduce_into(self, out: torch.Tensor, x: torch.Tensor) -> None:
        if cuda.fits(x, out):
            self._launch_sum(out, x)
            return
        # Whole vectors, the last of which ends with zeros, in rows that are not too long.
        vector = cuda.VECTOR // x.element_size()
        flat = functional.pad(x.reshape(-1), (0, -x.numel() % vector)).clone()
        rows = flat.view(-1, cuda.width_of(flat.numel(), vector))
        self._launch_sum(rows, rows)
        out.copy_(flat[: x.numel()].view(x.shape))

    def _launch_sum(self, out: torch.Tensor, x: torch.Tensor) -> None:
        for part in self._launches_of(x):
            taken = slice(part.first, part.first + part.count)
            self._launch(
                cuda.collective_kernel("sum", self.size, x.dtype, x.dtype),
                part,
                k=x.size(1),
                **cuda.arguments_of(x=x[taken], out=out[taken]),
            )

    def norm_into(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        residual: torch.Tensor | None,
        out: torch.Tensor,
        total: torch.Tensor,
        *,
        scale: torch.Tensor | None = None,
        zero_point: torch.Tensor | None = None,
        scale_out: torch.Tensor | None = None,
        group: int = 0,
        power_of_two: bool = False,
        n_active: torch.Tensor | None = None,
    ) -> bool:
        """Do an op of `all_reduce_norm.py` in one launch, or a few for many rows; its arguments.

        Return False, and do nothing, where rows are not whole vectors or too long: the sum and the
        norm are launches of their own then.
        """
        if not cuda.fits(x, residual, out, total, weight):
            return False
        kernel = cuda.collective_kernel(
            "rms_norm", self.size, x.dtype, out.dtype, weight.dtype, group
        )
        for part in self._launches_of(x):
            taken = slice(part.first, part.first + part.count)
            rows = cuda.arguments_of(
                x=x[taken],
                residual=None if residual is None else residual[taken],
                total=total[taken],
                out=out[taken],
            )
            scales = None
            if scale_out is not None:
                scales = scale_out[:, taken] if group else scale_out[taken]
            self._launch(
                kernel,
                part,
                k=x.size(1),
                norm_weight=weight.data_ptr(),
                eps=eps,
                static_scale=address_of(scale),
                zero_point=address_of(zero_point),
                scale_out=address_of(scales),
                scale_stride=0 if scales is None or not group else scales.stride(0),
                power_of_two=power_of_two,
                n_active=address_of(n_active),
                **rows,
            )
        return True

    def _launches_of(self, x: torch.Tensor, *, gathers: bool = False) -> list[cuda.Rows]:
        vectors = x.size(1) * x.element_size() // cuda.VECTOR
        parts = cuda.launches_of(x.size(0), vectors, self.size, self._region, gathers=gathers)
        return list(parts)

    def _launch(self, kernel: cuda.Collective, part: cuda.Rows, **given: Any) -> None:
        device = device_index(self.device)
        with on_device(device):
            stream = current_stream(device)
            load(kernel, device=device, stream=stream).launch(
                **given,
                m=part.count,
                first_row=part.first,
                two_shot=part.two_shot,
                control=self._control.data_ptr(),
                region_vectors=self._region,
                rank=self.rank,
                size=self.size,
                sms=max(1, gpu(device)[1] // self._shared),
                timeout_ns=int(self.timeout_s * 1e9),
                early_successor=self._shared == 1,
                pdl=pdl.enabled(),
                stream=stream,
            )


def local_peers(
    size: int,
    device: torch.device | str = "cuda",
    *,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    region_bytes: int = DEFAULT_REGION_BYTES,
) -> list[Communicator]:
    """Return communicators of ranks that are threads of this process and share one GPU.

    Each launches on a stream of its own: those of one stream would wait for each other in vain.
    See `run_ranks`.

    Args:
        size: how many ranks, 1 to 8.
        device: the GPU.
        timeout_s: how long a rank waits for the others, above 0.
        region_bytes: of a third of a rank's buffer.

    Raises:
        TypeError, ValueError: naming the argument.
    """
    checks.integer("size", size, least=1)
    device = torch.device(device)
    _check_kernels(size, device)
    region_bytes = _checked_region(region_bytes, size)
    _checked_timeout(timeout_s)
    index = device_index(device)
    memories = [
        torch.empty(_REGIONS * region_bytes, dtype=torch.uint8, device=f"cuda:{index}")
        for _ in range(size)
    ]
    buffers = [memory.data_ptr() for memory in memories]
    barrier = Barrier(size, timeout=timeout_s)

    def meet() -> None:
        try:
            barrier.wait()
        except BrokenBarrierError:
            raise CommunicatorError(f"a rank did not meet the others in {timeout_s:g} s") from None

    return [
        PeerCommunicator(rank, buffers, memory, meet, timeout_s=timeout_s, shared=size)
        for rank, memory in enumerate(memories)
    ]


def connect_peers(
    group: distributed.ProcessGroup,
    device: torch.device | str,
    *,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    region_bytes: int = DEFAULT_REGION_BYTES,
    exchange: Exchange | None = None,
) -> Communicator:
    """Return the communicator of this process for GPUs of one host: a collective of the group.

    Where every GPU can address the memory of all others it is a `PeerCommunicator`, whose buffers
    are symmetric memory of torch; otherwise a `GroupCommunicator` of the same group.

    Args:
        group: of `torch.distributed`, with a backend for the device.
        device: this rank's GPU.
        timeout_s: how long a rank waits for the others, above 0.
        region_bytes: of a third of a rank's buffer.
        exchange: returns the numbers that each rank has, in rank order, and raises where a rank
            does not come; by default a collective of the group, which may wait for ever.

    Raises:
        TypeError, ValueError: naming the argument.
    """
    device = torch.device(device)
    _check_gpu(device)
    device = torch.device("cuda", device_index(device))
    ranks = GroupCommunicator(group, device)
    _checked_timeout(timeout_s)
    if exchange is None:
        exchange = partial(_of_all_ranks, ranks)
    # Also so that none waits for another in what follows, where torch lets no thread run.
    if not _all_reach_each_other(ranks, exchange):
        return ranks
    region_bytes = _checked_region(region_bytes, ranks.size)
    # Imported here: torch on a machine without CUDA may lack it.
    from torch.distributed import _symmetric_memory as symmetric_memory

    memory = symmetric_memory.empty(_REGIONS * region_bytes, dtype=torch.uint8, device=device)
    mapped = symmetric_memory.rendezvous(memory, group.group_name)
    # Torch maps whole allocations, in which a rank's memory may begin behind others'.
    offset = memory.data_ptr() - mapped.buffer_ptrs[ranks.rank]
    offsets = exchange([offset])
    communicator = PeerCommunicator(
        ranks.rank,
        [base + at for base, [at] in zip(mapped.buffer_ptrs, offsets, strict=True)],
        memory,
        lambda: exchange([0]),
        timeout_s=timeout_s,
    )
    communicator.keep(mapped)
    exchange([0])
    return communicator


def _host_words() -> torch.Tensor:
    return torch.zeros(2, dtype=torch.int32, pin_memory=True)


def _all_reach_each_other(ranks: Communicator, exchange: Exchange) -> bool:
    """Return whether each rank's GPU can address the memory of all others: a collective."""
    index = device_index(ranks.device)
    host = int.from_bytes(sha256(socket.gethostname().encode()).digest()[:7], "big")
    places = exchange([host, index])
    others = [place for rank, place in enumerate(places) if rank != ranks.rank]
    reaches = (
        ranks.size <= cuda.MOST_RANKS
        and runs(cuda.Collective, index)
        and all(other_host == host for other_host, _ in others)
        # The same index is the same GPU, or one that this process can not see.
        and all(other != index and other < torch.cuda.device_count() for _, other in others)
        and all(torch.cuda.can_device_access_peer(index, other) for _, other in others)
    )
    return all(reached for [reached] in exchange([int(reaches)]))


def _of_all_ranks(ranks: GroupCommunicator, numbers: Sequence[int]) -> list[list[int]]:
    """Return the numbers that each rank has, in rank order: a collective."""
    own = torch.tensor(numbers, dtype=torch.int64, device=ranks.device)
    found = torch.empty((ranks.size, len(numbers)), dtype=torch.int64, device=ranks.device)
    ranks.gather_into(found, own)
    numbers_of_all: list[list[int]] = found.tolist()
    return numbers_of_all


def _check_gpu(device: torch.device) -> None:
    if device.type != "cuda":
        raise ValueError(f"device: got {device}, expected a GPU")


def _check_kernels(size: int, device: torch.device) -> None:
    _check_gpu(device)
    if size > cuda.MOST_RANKS:
        raise ValueError(f"size: got {size}, expected at most {cuda.MOST_RANKS}")
    if not runs(cuda.Collective, device_index(device)):
        raise ValueError(f"device: got {device}, expected a GPU that has kernels (sm_80 or later)")


def _checked_region(region_bytes: int, size: int) -> int:
    """Return a region's size in whole vectors."""
    checks.integer("region_bytes", region_bytes, least=cuda.least_region(size) * cuda.VECTOR)
    return region_bytes // cuda.VECTOR * cuda.VECTOR


def _checked_timeout(timeout_s: float) -> float:
    checks.number("timeout_s", timeout_s)
    if not 0 < timeout_s <= _MOST_TIMEOUT_S:
        raise ValueError(
            f"timeout_s: got {timeout_s}, expected a number above 0, at most {_MOST_TIMEOUT_S:g}"
        )
    return timeout_s
