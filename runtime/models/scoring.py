"""Logits of a whole sequence at once: for perplexity and for comparing models."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .cache import PagedKVCache
from .decoder import AttentionInputs, Decoder
from .kv_format import KVFormat, kv_format

_PAGE_SIZE = 16


def sequence_logits(
    model: Decoder, tokens: Sequence[int], *, cache_format: KVFormat | None = None
) -> torch.Tensor:
    """Return the logits after each token of one sequence, [len(tokens), vocab_size] fp32.

    The sequence is computed in one call, in a cache of its own.

    Args:
        model: the decoder.
        tokens: of the sequence.
        cache_format: of the cache; by default what `Engine` takes by default.

    Raises:
        ValueError: for no tokens, or more than the model's `max_context`.
    """
    if not 1 <= len(tokens) <= model.max_context:
        raise ValueError(f"tokens: got {len(tokens)}, expected 1 to {model.max_context}")
    pages = -(-len(tokens) // _PAGE_SIZE)
    cache = PagedKVCache.for_model(
        model.config,
        num_pages=pages + 1,
        page_size=_PAGE_SIZE,
        device=model.device,
        l2_partitioned=False,
        kv_format=cache_format or kv_format(model.config, model.kv_scales),
    )
    return model(*sequence_inputs(cache, tokens), cache)


def sequence_inputs(
    cache: PagedKVCache, tokens: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor, AttentionInputs]:
    """Add sequence 0 to a cache; return what a `Decoder` takes to compute it in one call.

    Raises:
        ValueError: when the cache has a sequence 0.
        OutOfPagesError: when its pages do not suffice.
    """
    device, length = cache.storage.device, len(tokens)
    cache.add(0)
    cache.reserve(0, length)
    attention = AttentionInputs(
        slot_mapping=torch.tensor(cache.slots(0, 0, length), device=device),
        page_table=cache.page_table([0], cache.pages_for(length)).to(device),
        seq_lens=torch.tensor([length], dtype=torch.int32, device=device),
        max_seqlen_q=length,
    )
    positions = torch.arange(length, dtype=torch.int32, device=device)
    return torch.tensor(tokens, device=device), positions, attention
