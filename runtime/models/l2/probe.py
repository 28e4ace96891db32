"""Which L2 partition of a GPU holds an address, found out by how long SMs take to reach it.

docs/notebooks/l2_partition.md says what was measured. An SM reaches its own partition in two thirds
of the time that the other takes. Which partition holds a block of 4096 bytes is the parity of some
bits of its physical address: within a page of 2 MiB those of an offset, and one more for the whole
page.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray

from ...jit.loader import load
from ...ops.attention.l2_partition import L2Probe
from ...ops.common.device import current_stream, on_device

PAGE_BYTES = 2 << 20  # of the GPU's memory, the least that is mapped
BLOCK_BYTES = 4096  # that one partition holds
_BLOCKS = PAGE_BYTES // BLOCK_BYTES
# What must hold of clocks, or no partitions are told apart: the other partition is so much further
# away, and so many of all are on the right side between both.
_LEAST_RATIO, _LEAST_RIGHT = 1.1, 0.99
_TRIES = 3  # since the GPU may be busy with something else

_Ints = NDArray[np.int64]


@dataclass(frozen=True)
class L2Map:
    """What tells L2 partitions of one GPU apart.

    Args:
        mask: bits of an offset within a page whose parity is the partition, but for the page's own
            bit.
        sms: by SM, the partition that it is on.
        between: by SM, clocks that are more than its own partition takes and less than the other.
    """

    mask: int
    sms: tuple[int, ...]
    between: tuple[float, ...]

    def partitions(self, clocks: _Ints, sms: _Ints) -> _Ints:
        """Return the partition that holds each place, from the clocks of the SM that reached it."""
        own = np.asarray(self.sms)[sms]
        return np.where(clocks < np.asarray(self.between)[sms], own, 1 - own)


def parity(numbers: _Ints) -> _Ints:
    """Return whether an odd number of bits is set in each."""
    bits = numbers.astype(np.uint64)
    for shift in (32, 16, 8, 4, 2, 1):
        bits = bits ^ (bits >> np.uint64(shift))
    return (bits & np.uint64(1)).astype(np.int64)


def find_partitions(clocks: _Ints, sms: _Ints) -> L2Map | None:
    """Return how to tell partitions by what every SM takes to each block of a page, in order.

    Args:
        clocks: [SMs, blocks].
        sms: [SMs], who has a row.

    Returns:
        None where the clocks are not those of two partitions, or not of each SM once.
    """
    if sorted(sms.tolist()) != list(range(len(sms))):
        return None
    means = clocks.mean(axis=1, keepdims=True)
    centred = clocks - means - clocks.mean(axis=0, keepdims=True) + clocks.mean()
    rows = np.where(centred @ centred[0] > 0, 0, 1)  # SMs that are near where the first is
    if rows.min() == rows.max():
        return None
    blocks = np.where(centred[rows == 0].mean(axis=0) < centred[rows == 1].mean(axis=0), 0, 1)
    own = rows[:, None] == blocks[None, :]
    if own.all(axis=1).any() or not own.any(axis=1).all():
        return None
    near = np.array([row[mine].mean() for row, mine in zip(clocks, own, strict=True)])
    far = np.array([row[~mine].mean() for row, mine in zip(clocks, own, strict=True)])
    between = (near + far) / 2
    right = ((clocks < between[:, None]) == own).mean()
    bits = [BLOCK_BYTES << bit for bit in range(_BLOCKS.bit_length() - 1)]
    mask = sum(bit for bit in bits if blocks[bit // BLOCK_BYTES] != blocks[0])
    explained = blocks == blocks[0] ^ parity(np.arange(_BLOCKS) * BLOCK_BYTES & mask)
    if (far < _LEAST_RATIO * near).any() or right < _LEAST_RIGHT or not explained.all():
        return None
    order = np.argsort(sms)
    return L2Map(mask, tuple(rows[order].tolist()), tuple(between[order].tolist()))


def probe(device: int, base: int, offsets: _Ints, *, by_all: bool) -> tuple[_Ints, _Ints]:
    """Return clocks to reach each `base + offset`, which stays as it is, and who took them.

    Args:
        device: index of the GPU, whose memory it is.
        base: an address.
        offsets: in bytes, multiples of 4.
        by_all: every SM reaches each, or else one SM does.

    Returns:
        (clocks [SMs, offsets], SMs [SMs]) or (clocks [offsets], SMs [offsets]).
    """
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    count = len(offsets)
    with on_device(device):
        stream = current_stream(device)
        where = torch.from_numpy(np.ascontiguousarray(offsets)).to(f"cuda:{device}")
        shape = (sms, count) if by_all else (count,)
        clocks = torch.empty(shape, dtype=torch.int32, device=where.device)
        who = torch.empty(sms, dtype=torch.int32, device=where.device)
        load(L2Probe(), device=device, stream=stream).launch(
            base=base,
            offsets=where.data_ptr(),
            clocks=clocks.data_ptr(),
            sms=who.data_ptr(),
            count=count,
            by_all=by_all,
            stream=stream,
        )
        found = who.cpu().numpy().astype(np.int64)
        taken = clocks.cpu().numpy().astype(np.int64)
    return taken, found if by_all else found[np.arange(count) % sms]


@cache
def l2_map(device: int) -> L2Map | None:
    """Return what tells the L2 partitions of a Hopper GPU apart, None where nothing does."""
    room = torch.zeros(2 * PAGE_BYTES, dtype=torch.uint8, device=f"cuda:{device}")
    page = -room.data_ptr() % PAGE_BYTES
    offsets = page + np.arange(_BLOCKS) * BLOCK_BYTES
    for _ in range(_TRIES):
        found = find_partitions(*probe(device, room.data_ptr(), offsets, by_all=True))
        if found is not None:
            return found
    return None
