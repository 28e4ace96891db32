"""Memory of which it is known which L2 partition of a GPU holds what, and a cache's pages in it.

The partition that holds a page of 2 MiB is up to the driver. So pages are asked for, told apart
(`probe.py`), and mapped in such an order that the partition is the parity of some bits of an
address, the same for every layer of a cache. They are asked for two by two, which takes half the
time: most pairs have one page in each partition, or on other days most have both in one. Where
memory is short of pairs of the kind of most, single pages make up for them.
"""

from __future__ import annotations

import importlib
import math
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ...interrupts import Uninterrupted, uninterrupted
from ...ops.attention.l2_partition import L2Partition, L2Probe
from ...ops.common.device import on_device, runs
from .probe import BLOCK_BYTES, PAGE_BYTES, L2Map, l2_map, parity, probe

_PAIR_BYTES = 2 * PAGE_BYTES
# Pairs of pages are mapped in turn, those that begin in partition 0 and those that begin in
# partition 1. So these bits of an address tell, besides those within a page: where both pages of a
# pair are in one partition, and where they are not.
_PAGE_BITS = (_PAIR_BYTES, _PAIR_BYTES | PAGE_BYTES)
# A layer's keys begin where these are 0, so that they all have the same parities, and so do its
# values. Where that would waste more than a fourth they lie anywhere.
_GROUP_BYTES = 2 * _PAIR_BYTES
_LEAST_ARRAY_BYTES = 4 * _GROUP_BYTES
# How far from torch's memory, so that both may grow.
_CLEARANCE_BYTES, _PLACES = 64 << 30, 16
# How often more pairs are asked for, and how many more than are missing.
_ROUNDS, _SPARE = 4, 16
_LEAST_AS_EXPECTED = 0.99
_OUT_OF_MEMORY = 2  # CUresult


def partitioned_storage(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, L2Partition] | None:
    """Return zeros for a paged cache, and which L2 partition holds a head of a page.

    Args:
        shape: [layers, 2, pages, page_size, heads_kv, dim].
        dtype: of the elements.
        device: a GPU.

    Returns:
        None where partitions are not known: on other GPUs than Hopper's; without cuda-python; for
        small caches; where a head's keys in a page are more than 4096 bytes, or these and the
        heads are no powers of two; or for want of memory.
    """
    if device.type != "cuda":
        return None
    layers, kinds, pages, page_size, heads, dim = shape
    head_bytes = page_size * dim * dtype.itemsize
    page_bytes = heads * head_bytes
    if (
        head_bytes > BLOCK_BYTES
        or page_bytes > PAGE_BYTES
        or head_bytes.bit_count() != 1
        or heads.bit_count() != 1
        or pages * page_bytes < _LEAST_ARRAY_BYTES
    ):
        return None
    index = torch.cuda.current_device() if device.index is None else device.index
    cu = _driver(index) if runs(L2Probe, index) else None
    l2 = None if cu is None else l2_map(index)
    if l2 is None:
        return None
    in_heads = l2.mask // head_bytes & heads - 1
    if in_heads == 0:
        return None
    array_bytes = -(-pages * page_bytes // _GROUP_BYTES) * _GROUP_BYTES
    allocated = _allocate(cu, index, layers * kinds * array_bytes, l2)
    if allocated is None:
        return None
    memory, mask = allocated
    arrays = memory.view(dtype).view(layers, kinds, -1)
    used = arrays[:, :, : math.prod(shape[2:])]
    storage = used.unflatten(2, (pages, heads, page_size, dim)).transpose(3, 4)
    return storage.zero_(), L2Partition(l2.sms, mask // page_bytes, in_heads)


def rounding(layers: int, room: int) -> int:
    """Return how many of `room` bytes a cache may take besides its pages, at most."""
    return min(2 * layers * _GROUP_BYTES, room // 5)  # of its pages a fourth: _LEAST_ARRAY_BYTES


def free_unused() -> None:
    """Give back the memory of caches that are gone, after what their GPU still does.

    Making a cache does it, too, and so does an engine that looks for memory. Nothing else can: a
    cache may go at any time, while a graph is captured as well, and then the GPU must not be waited
    for. Nor may it be here: if some memory is unused, do not call this during a capture.
    """
    with Uninterrupted(), _freeing:
        while _unused:
            try:
                _unused[0].release()
            except RuntimeError:
                del _unused[0]  # or no cache could be made any more
                raise
            del _unused[0]  # not before: what is interrupted is done again


@dataclass(frozen=True)
class _Memory:
    """Some of a GPU's memory, at no address yet."""

    handle: Any
    bytes: int


class _Mapping:
    """Memory of a GPU at one address, piece by piece, until it is released."""

    def __init__(self, cu: Any, device: int, pieces: Sequence[_Memory]) -> None:
        self._cu, self._device, self._pieces = cu, device, list(pieces)
        self.bytes = sum(piece.bytes for piece in pieces)
        self.address = _reserve(cu, device, self.bytes)
        self._reserved, self._mapped = True, 0
        try:
            for piece in self._pieces:
                _call(cu.cuMemMap(self.address + self._mapped, piece.bytes, 0, piece.handle, 0))
                self._mapped += piece.bytes
            access = cu.CUmemAccessDesc()
            access.location = _location(cu, device)
            access.flags = cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
            _call(cu.cuMemSetAccess(self.address, self.bytes, [access], 1))
        except BaseException:
            self.unmap()
            raise

    def unmap(self) -> None:
        """Give the address back; again does nothing."""
        if self._mapped:
            _call(self._cu.cuMemUnmap(self.address, self._mapped))
            self._mapped = 0
        if self._reserved:
            self._reserved = False
            _call(self._cu.cuMemAddressFree(self.address, self.bytes))

    def release(self) -> None:
        """Give address and memory back, after what the GPU still does; again goes on with it."""
        with on_device(self._device):
            torch.cuda.synchronize()
            self.unmap()
            _release(self._cu, self._pieces)


class _Owner:
    """What torch holds as long as a tensor is in the memory."""

    def __init__(self, mapping: _Mapping) -> None:
        self.__cuda_array_interface__ = {
            "shape": (mapping.bytes,),
            "typestr": "|u1",
            "data": (mapping.address, False),
            "version": 3,
        }
        weakref.finalize(self, _unused.append, mapping).atexit = False


_unused: list[_Mapping] = []
_freeing = threading.Lock()


@uninterrupted
def _allocate(cu: Any, device: int, size: int, l2: L2Map) -> tuple[torch.Tensor, int] | None:
    """Return bytes [size], a multiple of groups, and which bits of an offset tell their
    partition.
    """
    with on_device(device):
        torch.cuda.current_stream().synchronize()  # and the driver's context is torch's
        owned: list[_Memory] = []
        try:
            mapped = _map_in_order(cu, device, size // _PAIR_BYTES, l2, owned)
        except (_OutOfMemoryError, torch.OutOfMemoryError):
            mapped = None
        finally:
            _release(cu, owned)
        if mapped is None:
            return None
        mapping, mask = mapped
        owner = _Owner(mapping)
        # Made in inference mode it could not be written outside it.
        with torch.inference_mode(False):
            return torch.as_tensor(owner, device=f"cuda:{device}"), mask


def _map_in_order(
    cu: Any, device: int, pairs: int, l2: L2Map, owned: list[_Memory]
) -> tuple[_Mapping, int] | None:
    """Return so many pairs of pages, mapped in turn, and the bits that tell.

    None where that cannot be. What is asked for and not in the mapping stays in `owned`.
    """
    found = _in_order(cu, device, pairs, l2, owned)
    if found is None:
        return None
    order, apart = found
    mask = l2.mask | _PAGE_BITS[apart]
    mapping = _Mapping(cu, device, order)
    kept = {id(piece) for piece in order}
    owned[:] = [piece for piece in owned if id(piece) not in kept]
    try:
        as_expected = _as_expected(device, mapping, l2, mask)
    except BaseException:
        mapping.release()
        raise
    if as_expected < _LEAST_AS_EXPECTED:
        mapping.release()
        return None
    return mapping, mask


def _in_order(
    cu: Any, device: int, pairs: int, l2: L2Map, owned: list[_Memory]
) -> tuple[list[_Memory], int] | None:
    """Return memory for so many pairs of pages in turn, and whether a pair is of both partitions.

    None where memory does not suffice. All that is asked for is in `owned`, until it is released.
    """
    each = pairs // 2
    pages: tuple[list[_Memory], list[_Memory]] = ([], [])
    # By whether its pages are in two partitions, and by the partition of the first.
    by_kind: tuple[tuple[list[_Memory], list[_Memory]], ...] = (([], []), ([], []))

    def missing(kind: int) -> list[int]:
        return [max(each - len(pieces), 0) for pieces in by_kind[kind]]

    apart, count = 1, pairs
    for _ in range(_ROUNDS):
        made = _create(cu, device, count, _PAIR_BYTES, owned)
        for piece, (first, second) in zip(made, _tell(cu, device, made, l2), strict=True):
            by_kind[first ^ second][first].append(piece)
        apart = min((1, 0), key=lambda kind: sum(missing(kind)))
        if not any(missing(apart)) or len(made) < count:
            break
        count = 2 * max(missing(apart)) + _SPARE
    found = by_kind[apart]
    if any(missing(apart)):
        useful = {id(piece) for pieces in found for piece in pieces[:each]}
        useless = [piece for piece in owned if id(piece) not in useful]
        owned[:] = [piece for piece in owned if id(piece) in useful]
        _release(cu, useless)
        wanted = [0, 0]  # pages of either partition
        for first, count in enumerate(missing(apart)):
            wanted[first] += count
            wanted[first ^ apart] += count
        singles = _singles(cu, device, wanted, l2, owned)
        if singles is None:
            return None
        pages = singles
    order = []
    for turn in range(pairs):
        first = turn % 2
        pieces = found[first]
        if turn // 2 < len(pieces):
            order.append(pieces[turn // 2])
        else:
            order += [pages[first].pop(), pages[first ^ apart].pop()]
    return order, apart


def _singles(
    cu: Any, device: int, wanted: Sequence[int], l2: L2Map, owned: list[_Memory]
) -> tuple[list[_Memory], list[_Memory]] | None:
    """Return so many pages of each partition, or more; None where memory does not suffice."""
    found: tuple[list[_Memory], list[_Memory]] = ([], [])

    def missing() -> int:
        return max(count - len(pages) for count, pages in zip(wanted, found, strict=True))

    for _ in range(_ROUNDS):
        count = 2 * missing() + _SPARE
        made = _create(cu, device, count, PAGE_BYTES, owned)
        for page, (partition,) in zip(made, _tell(cu, device, made, l2), strict=True):
            found[partition].append(page)
        if missing() <= 0:
            return found
        if len(made) < count:
            break
    return None


def _tell(cu: Any, device: int, pieces: list[_Memory], l2: L2Map) -> NDArray[np.int64]:
    """Return the partition of each page [pieces, pages of a piece]."""
    if not pieces:
        return np.empty((0, 1), dtype=np.int64)
    mapping = _Mapping(cu, device, pieces)
    try:
        places = np.arange(0, mapping.bytes, PAGE_BYTES)
        partitions = l2.partitions(*probe(device, mapping.address, places, by_all=False))
    finally:
        torch.cuda.current_stream().synchronize()  # what was interrupted may be probing still
        mapping.unmap()
    return partitions.reshape(len(pieces), -1)


def _as_expected(device: int, mapping: _Mapping, l2: L2Map, mask: int) -> float:
    """Return of how many of all pages a block is in the partition where it should be."""
    offsets = np.arange(0, mapping.bytes, PAGE_BYTES)
    blocks = np.random.default_rng(0).integers(PAGE_BYTES // BLOCK_BYTES, size=len(offsets))
    offsets += blocks * BLOCK_BYTES  # some of one partition and some of the other
    found = l2.partitions(*probe(device, mapping.address, offsets, by_all=False))
    return float((found == parity(offsets & mask)).mean())


def _create(cu: Any, device: int, count: int, size: int, owned: list[_Memory]) -> list[_Memory]:
    """Return so many pieces, which are added to `owned`; fewer where memory ends."""
    properties = cu.CUmemAllocationProp()
    properties.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location = _location(cu, device)
    for last in (False, True):
        before = len(owned)
        try:
            for _ in range(count):
                owned.append(_Memory(_call(cu.cuMemCreate(size, properties, 0)), size))
        except _OutOfMemoryError:
            # All, to be asked for once more; then a few, for what is launched and made meanwhile.
            useless = owned[max(before, len(owned) - _SPARE) if last else before :]
            del owned[len(owned) - len(useless) :]
            _release(cu, useless)
        else:
            break
        if not last:
            torch.cuda.empty_cache()
    return owned[before:]


def _reserve(cu: Any, device: int, size: int) -> int:
    """Return an address with room for that much behind it, near torch's memory if there is some.

    The driver would choose 0x302000000. Two small numbers side by side in a kernel's parameters
    look like an address there, to who looks for those that are gone (the audit of graphs).
    """
    theirs = torch.empty(1, dtype=torch.uint8, device=f"cuda:{device}").data_ptr()
    step = size + _CLEARANCE_BYTES
    for place in range(1, _PLACES + 1):  # where other caches are there is no room
        hint = max(theirs - place * step, 0) // _GROUP_BYTES * _GROUP_BYTES
        status, address = cu.cuMemAddressReserve(size, _GROUP_BYTES, hint, 0)
        if int(status):
            continue
        if abs(int(address) - hint) < _CLEARANCE_BYTES:
            return int(address)
        _call(cu.cuMemAddressFree(address, size))
    return int(_call(cu.cuMemAddressReserve(size, _GROUP_BYTES, 0, 0)))


def _location(cu: Any, device: int) -> Any:
    location = cu.CUmemLocation()
    location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    location.id = device
    return location


def _release(cu: Any, pieces: list[_Memory]) -> None:
    """Give all pieces back, and empty the list: one at a time, so that none is given back twice."""
    failed = 0
    while pieces:
        status = cu.cuMemRelease(pieces.pop().handle)[0]
        failed = failed or int(status)
    if failed:
        raise RuntimeError(f"the CUDA driver did not take memory back: error {failed}")


class _OutOfMemoryError(RuntimeError):
    """The driver has no memory left."""


def _call(result: tuple[Any, ...]) -> Any:
    """Return what a call of the driver's gave.

    Raises:
        RuntimeError: when it failed.
    """
    status, *values = result
    if int(status):
        kind = _OutOfMemoryError if int(status) == _OUT_OF_MEMORY else RuntimeError
        raise kind(f"the CUDA driver refused memory of 2 MiB pages: {status!r}")
    return values[0] if values else None


def _driver(device: int) -> Any | None:
    """Return cuda-python's driver, None where there is none that maps pages of the GPU."""
    try:
        cu = importlib.import_module("cuda.bindings.driver")
    except ImportError:
        return None
    torch.cuda.init()  # the driver, too
    supported = cu.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
    status, answer = cu.cuDeviceGetAttribute(supported, device)
    return cu if int(status) == 0 and answer else None
