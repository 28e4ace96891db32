"""Angles of rotary embeddings in fp32, as `ops.append_kv` takes them."""

from __future__ import annotations

import torch

# vLLM's angles, which the layers of a model share, and the same in fp32.
_known: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}


def fp32_angles(cos_sin_cache: torch.Tensor) -> torch.Tensor:
    """Return vLLM's cosines and sines [max_positions, rotary_dim] in fp32, one copy for all layers.

    The first call for a tensor copies it, unless it is in fp32.
    """
    if cos_sin_cache.dtype is torch.float32:
        return cos_sin_cache
    address = cos_sin_cache.data_ptr()
    if address not in _known:
        _known[address] = (cos_sin_cache, cos_sin_cache.float())
    return _known[address][1]
