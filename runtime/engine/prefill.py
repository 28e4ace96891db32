"""Computing prompts: chunks of several requests in one varlen call."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ostinato.engine.scheduler import PrefillChunk
from ostinato.engine.upload import upload
from ostinato.model import AttentionInputs, Llama, PagedKVCache


class Prefill:
    """Appends chunks of prompts to the cache.

    Args:
        model, cache: what it runs on.
        max_pages: columns of the page table: the pages of the longest context.
        max_chunk: tokens of the largest chunk.
    """

    def __init__(self, model: Llama, cache: PagedKVCache, max_pages: int, max_chunk: int) -> None:
        self._model = model
        self._cache = cache
        self._max_pages = max_pages
        self._max_chunk = max_chunk

    def __call__(self, chunks: Sequence[PrefillChunk]) -> torch.Tensor:
        """Compute the chunks, and return the logits [R, vocab_size] of the R prompts that end."""
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        cu_seqlens = [0]
        last_rows = []
        for chunk in chunks:
            tokens += chunk.request.prompt[chunk.start : chunk.stop]
            positions += range(chunk.start, chunk.stop)
            slots += self._cache.slots(chunk.request.id, chunk.start, chunk.stop)
            cu_seqlens.append(len(tokens))
            if chunk.ends_prompt:
                last_rows.append(len(tokens) - 1)
        ids = [chunk.request.id for chunk in chunks]
        attention = AttentionInputs(
            slot_mapping=self._tensor(slots, torch.int64),
            page_table=upload(self._cache.page_table(ids, self._max_pages), self._model.device),
            seq_lens=self._tensor([chunk.stop for chunk in chunks], torch.int32),
            cu_seqlens_q=self._tensor(cu_seqlens, torch.int32),
            # The capacity, not this call's maximum: shapes must not depend on the neighbours.
            max_seqlen_q=self._max_chunk,
        )
        return self._model(
            self._tensor(tokens, torch.int64),
            self._tensor(positions, torch.int32),
            attention,
            self._cache,
            logits_rows=self._tensor(last_rows, torch.int64),
        )

    def _tensor(self, values: list[int], dtype: torch.dtype) -> torch.Tensor:
        return upload(torch.tensor(values, dtype=dtype), self._model.device)
