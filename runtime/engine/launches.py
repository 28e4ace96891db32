"""The work that a step gives the device, and the tokens that come back from it."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from ostinato.graphs import GraphRunner

from .. import ops
from ..models import Decoder, PagedKVCache
from .async_tokens import Accept, AsyncTokens
from .decode_step import DecodeStep, SeenTokens
from .logits_processing import PROCESSED, LogitsProcessing
from .prefill_step import Prefill
from .ranks.calls import Calls
from .request import Request
from .sampled_tokens import sampled_tokens
from .scheduler import PrefillChunk, Scheduler
from .stats import EngineStats


class Launches:
    """Does the steps of an engine: decode and prompt chunks, whose tokens it hands out later.

    Args:
        runner, decode: of the decode step.
        prefill: of prompts.
        model: what they run on.
        seen, processing: per-slot state.
        scheduler: is told what was computed.
        cache: of keys and values.
        stats: are told times and counts.
        calls: compare what ranks launch and sample.
        max_prefill_tokens: of one step with prompts.
    """

    def __init__(
        self,
        runner: GraphRunner[dict[str, torch.Tensor]],
        decode: DecodeStep,
        prefill: Prefill,
        *,
        model: Decoder,
        seen: SeenTokens,
        processing: LogitsProcessing | None,
        scheduler: Scheduler,
        cache: PagedKVCache,
        stats: EngineStats,
        calls: Calls,
        max_prefill_tokens: int,
    ) -> None:
        self._runner = runner
        self._decode = decode
        self._prefill = prefill
        self._model = model
        self._seen = seen
        self._processing = processing
        self._scheduler = scheduler
        self._cache = cache
        self._stats = stats
        self._calls = calls
        self._max_prefill_tokens = max_prefill_tokens
        self._async_tokens = AsyncTokens(seen.mask.device)

    def clear(self) -> None:
        """Forget tokens in flight, once they have come; their requests must not go on."""
        self._async_tokens.clear()

    def step(self, accept: Accept) -> None:
        """Admit requests, launch a token more of each and chunks of prompts, read older tokens.

        Args:
            accept: takes the tokens that are read.
        """

        def read(count: int | None = None) -> None:
            self._async_tokens.read(accept, count, self._calls)

        scheduler = self._scheduler
        scheduler.admit()
        # Also those that were admitted before an error.
        new = [request for request in scheduler.running if not request.marked]
        self._seen.reset({r.slot: [*r.prompt, *r.generated] for r in new})
        if self._processing is not None:
            self._processing.reset(new)
        for request in new:
            request.marked = True
        if self._processing is not None and self._processing.waits_for_host:
            read()  # the next token depends on the last, by way of the host
        batch = scheduler.decode_batch(settle=read)
        chunks = scheduler.prefill_chunks(self._max_prefill_tokens, beside=len(batch))
        launched_before = len(self._async_tokens)
        try:
            if chunks:
                self._compute_prompts(chunks, batch)
            else:
                self._decode_tokens(batch)
        except BaseException:
            # The next run overwrites what these tokens were copied from. Of several ranks there is
            # none: the others may wait for what this one has not launched, and must hear of it.
            if not self._calls.compares:
                read(launched_before)
            raise
        read(launched_before)
        self._stats.preemptions = scheduler.preemptions

    def _compute_prompts(self, chunks: Sequence[PrefillChunk], texts: Sequence[Request]) -> None:
        """Compute chunks of prompts, and a token more of texts beside them, in one call.

        Weights are read once for both. A first token is sampled where a prompt ends.
        """
        started = time.perf_counter()
        self._calls.launched([*texts, *(chunk.request for chunk in chunks)], self._cache)
        last_tokens = self._async_tokens.last_tokens(texts)
        hidden = self._prefill.compute(chunks, self._decode.rows(texts, last_tokens))
        sampled = [*texts, *(chunk.request for chunk in chunks if chunk.ends_prompt)]
        # Chunks that end no prompt are launches, too: the host waits for them as for any other,
        # and so is one step ahead of the device at most.
        tokens, logprobs = sampled_tokens(
            *(self._model, hidden, sampled, last_tokens, self._seen, self._processing)
        )
        seconds = [self._stats.prefill_seconds, *([self._stats.decode_seconds] if texts else [])]
        self._async_tokens.add(sampled, tokens, seconds, started, logprobs)
        # Only now: after an error the prompt is computed again, first token and all.
        self._scheduler.computed(chunks)
        self._stats.prefill_tokens += sum(chunk.stop - chunk.start for chunk in chunks)

    def _decode_tokens(self, batch: Sequence[Request]) -> None:
        """Sample one more token of each request."""
        if not batch:
            return
        self._calls.launched(batch, self._cache)
        largest = self._runner.max_batch_size
        last_tokens = self._async_tokens.last_tokens(batch)
        for at in range(0, len(batch), largest):
            started = time.perf_counter()
            part = batch[at : at + largest]
            inputs = self._decode.inputs(part, last_tokens[at : at + largest])
            logprobs = None
            if self._processing is not None and any(
                request.needs_processing for request in self._decode.asking
            ):
                self._processing.write_masks(self._decode.asking)
                outputs = self._runner.run(len(part), inputs, variant=PROCESSED)
                logprobs = ops.RowLogprobs(outputs["logprobs"], outputs["logprob_ids"])
            else:
                outputs = self._runner.run(len(part), inputs)
            tokens = outputs["tokens"]
            if len(batch) > largest:
                tokens = tokens.clone()  # the next part's run overwrites them
            self._async_tokens.add(part, tokens, [self._stats.decode_seconds], started, logprobs)
