"""How finely prompts may share the KV cache without a change of bits."""

from __future__ import annotations

import math

from ..models import Decoder, PagedKVCache
from ..ops.attention.prefill_variants import AttentionPrefill
from ..ops.common.device import device_index, runs


def sharing_unit(model: Decoder, cache: PagedKVCache, prefill_chunk: int) -> int:
    """Return the tokens in multiples of which prompts share their beginning.

    A prompt that shares n tokens computes the rest of a chunk from position n on. Its bits are
    those of the whole chunk where attention cuts the queries of both alike:

    - on the CPU at any position, so the unit is a page,
    - by our prefill kernels at multiples of their work tiles, counted from a chunk's first query:
      128 queries, or 192 with heads of up to 64 elements, which do not divide a chunk of 512,
    - by other kernels nowhere, so the unit is a chunk.

    Args:
        model: the decoder.
        cache: its KV cache.
        prefill_chunk: tokens of a prompt computed at once, a multiple of a page.
    """
    if model.device.type == "cpu":
        return cache.page_size
    if not model.batch_invariant or not runs(AttentionPrefill, device_index(model.device)):
        return prefill_chunk
    kernels = [k for k in model.kernels(cache.format) if isinstance(k, AttentionPrefill)]
    if not kernels:
        return prefill_chunk
    unit = math.lcm(cache.page_size, *(kernel.tile_queries for kernel in kernels))
    return prefill_chunk if prefill_chunk % unit else unit
