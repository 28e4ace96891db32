"""Memory of which it is known which half of a GPU's L2 holds what, and a cache's pages in it.

The half that holds a page of 2 MiB is up to the driver. So such pages are asked for one by one,
told apart (`ostinato.model.l2`), and mapped in turn, those of one half and those of the other: then
the half is the parity of some bits of an address, the same for every layer of a cache.
"""

from __future__ import annotations

import importlib
import math
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ostinato.model.l2 import BLOCK_BYTES, PAGE_BYTES, L2Map, l2_map, parity, probe
from ostinato.ops.halves import L2Halves
from ostinato.ops.launch import has_kernels, on_device

# A layer's keys begin at a multiple of two pages, so that they all have the same parities, and so
# do its values. Where that would waste more than a fourth they lie anywhere.
_PAIR_BYTES = 2 * PAGE_BYTES
_LEAST_ARRAY_BYTES = 4 * _PAIR_BYTES
# Pages that are asked for besides, since not as many of one half come as of the other.
_SPARE_PAGES, _SPARE_SHARE = 64, 50
_LEAST_AS_EXPECTED = 0.99


def halved_storage(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, L2Halves] | None:
    """Return zeros for a paged cache, and which half of the L2 holds a head of a page.

    Args:
        shape: [layers, 2, pages, page_size, heads_kv, dim].
        dtype: of the elements.
        device: a GPU.

    Returns:
        None where halves are not known: on other GPUs than Hopper's, or without cuda-python; for
        small caches; where a head's keys in a page are more than 4096 bytes, or these and the
        heads are no powers of two; or for want of memory.
    """
    layers, kinds, pages, page_size, heads, dim = shape
    head_bytes = page_size * dim * dtype.itemsize
    page_bytes = heads * head_bytes
    if (
        device.type != "cuda"
        or head_bytes > BLOCK_BYTES
        or head_bytes.bit_count() != 1
        or heads.bit_count() != 1
        or pages * page_bytes < _LEAST_ARRAY_BYTES
    ):
        return None
    index = torch.cuda.current_device() if device.index is None else device.index
    cu = _driver(index)
    l2 = l2_map(index) if cu is not None and has_kernels(index) else None
    if l2 is None:
        return None
    in_page = (l2.mask | PAGE_BYTES) // page_bytes
    in_heads = l2.mask // head_bytes & heads - 1
    if in_heads == 0:
        return None
    array_bytes = -(-pages * page_bytes // _PAIR_BYTES) * _PAIR_BYTES
    memory = _allocate(cu, index, layers * kinds * array_bytes, l2)
    if memory is None:
        return None
    arrays = memory.view(dtype).view(layers, kinds, -1)
    used = arrays[:, :, : math.prod(shape[2:])]
    storage = used.unflatten(2, (pages, heads, page_size, dim)).transpose(3, 4)
    return storage.zero_(), L2Halves(l2.sms, in_page, in_heads)


def free_unused() -> None:
    """Give back the memory of caches that are gone, after what their GPU still does.

    Making a cache does it, too. Nothing else can: a cache may go while a graph is captured.
    """
    while _unused:
        _unused.pop().release()


class _Mapping:
    """Pages of a GPU at one address, until they are released."""

    def __init__(self, cu: Any, device: int, handles: Sequence[Any]) -> None:
        self._cu, self._device, self._handles = cu, device, list(handles)
        self.bytes = len(self._handles) * PAGE_BYTES
        self.address = int(_call(cu.cuMemAddressReserve(self.bytes, _PAIR_BYTES, 0, 0)))
        mapped = 0
        try:
            for handle in self._handles:
                at = self.address + mapped
                _call(cu.cuMemMap(at, PAGE_BYTES, 0, handle, 0))
                mapped += PAGE_BYTES
            access = cu.CUmemAccessDesc()
            access.location = _location(cu, device)
            access.flags = cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
            _call(cu.cuMemSetAccess(self.address, self.bytes, [access], 1))
        except BaseException:
            self._unmap(mapped)
            raise

    def unmap(self) -> None:
        self._unmap(self.bytes)

    def release(self) -> None:
        with on_device(self._device):
            torch.cuda.synchronize()
            self.unmap()
            _release(self._cu, self._handles)

    def _unmap(self, mapped: int) -> None:
        if mapped:
            _call(self._cu.cuMemUnmap(self.address, mapped))
        _call(self._cu.cuMemAddressFree(self.address, self.bytes))


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


def _allocate(cu: Any, device: int, size: int, l2: L2Map) -> torch.Tensor | None:
    """Return bytes [size or more], the half of which is the parity of their address's bits."""
    free_unused()
    wanted = -(-size // _PAIR_BYTES) * (_PAIR_BYTES // PAGE_BYTES)
    with on_device(device):
        torch.cuda.synchronize()  # and the driver's context is torch's
        handles = _create(cu, device, wanted + _SPARE_PAGES + wanted // _SPARE_SHARE)
        if handles is None:
            return None
        try:
            mapping = _in_order(cu, device, handles, wanted, l2)
        except BaseException:
            _release(cu, handles)
            raise
        if mapping is None:
            return None
        owner = _Owner(mapping)
        # Made in inference mode it could not be written outside it.
        with torch.inference_mode(False):
            return torch.as_tensor(owner, device=f"cuda:{device}")


def _in_order(cu: Any, device: int, handles: list[Any], wanted: int, l2: L2Map) -> _Mapping | None:
    """Return `wanted` of the pages, mapped in turn; releases the others, or all for None."""
    mapping = _Mapping(cu, device, handles)
    try:
        places = np.arange(len(handles)) * PAGE_BYTES
        halves = l2.halves(*probe(device, mapping.address, places, by_all=False))
    finally:
        mapping.unmap()
    turns = [np.flatnonzero(halves == half)[: wanted // 2].tolist() for half in (0, 1)]
    enough = min(map(len, turns)) == wanted // 2
    order = [index for pair in zip(*turns, strict=True) for index in pair] if enough else []
    kept = set(order)
    _release(cu, [handle for i, handle in enumerate(handles) if i not in kept])
    handles[:] = [handles[i] for i in order]
    if not enough:
        return None
    mapping = _Mapping(cu, device, handles)
    try:
        as_expected = _as_expected(device, mapping, l2)
    except BaseException:
        mapping.unmap()
        raise
    if as_expected < _LEAST_AS_EXPECTED:
        mapping.release()
        return None
    return mapping


def _as_expected(device: int, mapping: _Mapping, l2: L2Map) -> float:
    """Return of how many of all pages a block is in the half where it should be."""
    offsets = np.arange(0, mapping.bytes, PAGE_BYTES)
    blocks = np.random.default_rng(0).integers(PAGE_BYTES // BLOCK_BYTES, size=len(offsets))
    offsets += blocks * BLOCK_BYTES  # some of one half and some of the other
    found = l2.halves(*probe(device, mapping.address, offsets, by_all=False))
    return float((found == parity(offsets & (l2.mask | PAGE_BYTES))).mean())


def _create(cu: Any, device: int, count: int) -> list[Any] | None:
    """Return so many pages, None where there is no memory for them."""
    properties = cu.CUmemAllocationProp()
    properties.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location = _location(cu, device)
    for last in (False, True):
        handles: list[Any] = []
        for _ in range(count):
            status, handle = cu.cuMemCreate(PAGE_BYTES, properties, 0)
            if status == cu.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
                break
            if int(status):
                _release(cu, handles)
            handles.append(_call((status, handle)))
        else:
            return handles
        _release(cu, handles)
        if not last:
            torch.cuda.empty_cache()
    return None


def _location(cu: Any, device: int) -> Any:
    location = cu.CUmemLocation()
    location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    location.id = device
    return location


def _release(cu: Any, handles: Sequence[Any]) -> None:
    for handle in handles:
        _call(cu.cuMemRelease(handle))


def _call(result: tuple[Any, ...]) -> Any:
    """Return what a call of the driver's gave.

    Raises:
        RuntimeError: when it failed.
    """
    status, *values = result
    if int(status):
        raise RuntimeError(f"the CUDA driver refused memory of 2 MiB pages: {status!r}")
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
