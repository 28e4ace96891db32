"""How large an engine is, checked before anything is made, and the same on all ranks."""

from __future__ import annotations

from dataclasses import dataclass

from ostinato.graphs.arguments import at_least_one

from ..models import Decoder, KVFormat, ScaleKind, kv_format
from .cache_size import check_room, checked_pages
from .logits_processing import LogitsProcessing
from .ranks.calls import Calls
from .scheduler import checked_chunk, checked_context
from .sharing import cut_unit, sharing_unit

_SEEN_TOKENS = 65536  # 256 MiB with 8 KV heads of 128


@dataclass(frozen=True)
class EngineSizes:
    """The arguments of an `Engine`, checked, with defaults put in, and what follows from them.

    Attributes:
        kv_format: of the KV cache.
        max_pages: of a sequence.
        max_tokens: of one step with prompts, those of texts among them.
        max_tokens_k: that these prompts have together, as of `ops.paged_attention`; None: as many
            as they have.
        sharing_unit: as of `Scheduler`.
    """

    max_batch: int
    max_context: int
    page_size: int
    num_pages: int
    prefill_chunk: int
    max_prefill_tokens: int
    kv_format: KVFormat
    max_pages: int
    max_tokens: int
    max_tokens_k: int | None
    sharing_unit: int

    @property
    def max_chunks(self) -> int:
        """Chunks of prompts in one step: the last of each request, and whole ones."""
        return self.max_batch + self.max_tokens // self.prefill_chunk

    @staticmethod
    def of(
        model: Decoder,
        calls: Calls,
        *,
        max_batch: int,
        max_context: int | None,
        page_size: int,
        num_pages: int | None,
        prefill_chunk: int | None,
        max_prefill_tokens: int,
        kv_cache_dtype: str,
        kv_scales: ScaleKind | None,
        logits_processing: bool,
        memory_fraction: float,
    ) -> EngineSizes:
        """Return the sizes for the arguments of `Engine`.

        Over several ranks, by their `calls`, all have as many pages as the one with the fewest.

        Raises:
            TypeError, ValueError: as `Engine`, or where ranks have different arguments.
        """
        cache_format = kv_format(model.config, model.kv_scales, kv_cache_dtype, kv_scales)
        max_batch = at_least_one("max_batch", max_batch)
        page_size = at_least_one("page_size", page_size)
        max_prefill_tokens = at_least_one("max_prefill_tokens", max_prefill_tokens)
        max_context = checked_context(max_context, model.max_context)
        unit = cut_unit(model, cache_format, page_size)
        prefill_chunk = checked_chunk(prefill_chunk, page_size, unit)
        max_pages = -(-max_context // page_size)
        max_tokens_k = _dequantized_tokens(cache_format, max_batch, max_context, model)
        num_pages = checked_pages(
            *(model.config, cache_format, page_size, model.device),
            *(num_pages, max_batch * max_pages, memory_fraction),
            max_tokens_k,
        )
        # Of each slot the tokens that it has seen, a byte per token of the vocabulary.
        slot_bytes = model.config.vocab_size
        if logits_processing:
            slot_bytes += LogitsProcessing.slot_bytes(slot_bytes, max_context)
        check_room("max_batch", max_batch, slot_bytes, model.device)
        options = {
            "max_batch": max_batch,
            "max_context": max_context,
            "page_size": page_size,
            "prefill_chunk": prefill_chunk,
            "max_prefill_tokens": max_prefill_tokens,
            "kv_cache_dtype": str(cache_format),
            "logits_processing": logits_processing,
            "model": f"{model.config.family} on {model.device.type}",
            "batch_invariant": model.batch_invariant,
            "checkpoint": model.fingerprint,
        }
        num_pages = calls.agree(num_pages, options)
        longest = max_context - 1  # of a prompt
        # The first chunk is computed whatever its size, and whatever texts there are.
        max_tokens = max(max_prefill_tokens, min(prefill_chunk, longest) + max_batch)
        return EngineSizes(
            *(max_batch, max_context, page_size, num_pages, prefill_chunk, max_prefill_tokens),
            kv_format=cache_format,
            max_pages=max_pages,
            max_tokens=min(max_tokens, max_batch * longest),
            max_tokens_k=max_tokens_k,
            sharing_unit=sharing_unit(unit, prefill_chunk),
        )


def _dequantized_tokens(
    cache_format: KVFormat, max_batch: int, max_context: int, model: Decoder
) -> int | None:
    """Return how many tokens of an 8-bit cache the prompts of a step may see; None: any number.

    They are dequantised for each layer, into memory that all layers share.
    """
    if model.device.type == "cpu" or cache_format.dtype == model.config.dtype:
        return None
    return min(max(max_context, _SEEN_TOKENS), max_batch * max_context)
