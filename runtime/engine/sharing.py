"""Where prompts may be cut without a change of bits: into chunks, and at what they share."""

from __future__ import annotations

import math

from ..models import Decoder, KVFormat
from ..ops.attention.prefill_variants import AttentionPrefill
from ..ops.common.device import device_index, runs


def cut_unit(model: Decoder, cache_format: KVFormat, page_size: int) -> int | None:
    """Return the tokens at multiples of which a prompt's bits do not depend on cuts; None: nowhere.

    A prompt that shares n tokens computes the rest of a chunk from position n on. Its bits are
    those of the whole chunk where attention cuts the queries of both alike:

    - on the CPU at any position, so the unit is a page,
    - by our prefill kernels at multiples of their work tiles, counted from a chunk's first query:
      128 queries; with heads of up to 64 elements 192 over an 8-bit cache, and else 384, since
      kernels have tiles of 128 and of 192,
    - by other kernels nowhere.

    Args:
        model: the decoder.
        cache_format: of its KV cache.
        page_size: of a page of it.
    """
    if model.device.type == "cpu":
        return page_size
    if not model.batch_invariant or not runs(AttentionPrefill, device_index(model.device)):
        return None
    kernels = [k for k in model.kernels(cache_format) if isinstance(k, AttentionPrefill)]
    if not kernels:
        return None
    return math.lcm(page_size, *(kernel.tile_queries for kernel in kernels))


def sharing_unit(unit: int | None, prefill_chunk: int) -> int:
    """Return the tokens in multiples of which prompts share their beginning: at most a chunk.

    Args:
        unit: that of `cut_unit`.
        prefill_chunk: tokens of a prompt computed at once, a multiple of a page.
    """
    return prefill_chunk if unit is None or prefill_chunk % unit else unit
