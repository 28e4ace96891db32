"""Outputs in the graphs' pool that do not hold their memory, so that all graphs can use it.

A run's outputs are good until the next run, so there is no need to keep the outputs of every graph
apart: of 35 batch sizes they would take several times the memory of the largest graph. What they
keep is the pool, so that reading them late gives other values, and never an illegal access.
"""

from __future__ import annotations

from collections.abc import Collection

import torch

from ..outputs import Outputs


def pool_views(outputs: Outputs, indices: Collection[int], keeper: object) -> Outputs:
    """Return the same outputs, those at `indices` without a hold on their memory.

    Args:
        outputs: what a capture returned.
        indices: which of them are in the pool.
        keeper: what keeps the pool's memory mapped; the outputs keep it.
    """
    blocks: dict[int, torch.Tensor] = {}
    tensors = [
        _view_of(blocks, tensor, keeper) if index in indices else tensor
        for index, tensor in enumerate(outputs.tensors)
    ]
    return outputs.like(tensors)


class _Block:
    """Memory as torch wraps it without owning it: the tensor keeps this object instead."""

    def __init__(self, address: int, size: int, keeper: object) -> None:
        self.__cuda_array_interface__ = {
            "version": 3,
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
        }
        self._keeper = keeper


def _view_of(blocks: dict[int, torch.Tensor], tensor: torch.Tensor, keeper: object) -> torch.Tensor:
    storage = tensor.untyped_storage()
    block = blocks.get(storage.data_ptr())
    if block is None:
        held = _Block(storage.data_ptr(), storage.nbytes(), keeper)
        block = torch.as_tensor(held, device=tensor.device)
        blocks[storage.data_ptr()] = block
    whole = block[: block.numel() // tensor.element_size() * tensor.element_size()]
    return whole.view(tensor.dtype).as_strided(
        tensor.size(), tensor.stride(), tensor.storage_offset()
    )
