"""Continuous batching: prompts in, token events out, over one captured decode step."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from tokenizers import Tokenizer

from ostinato import ops
from ostinato.engine.decode import DecodeStep, SeenTokens, sampling_inputs
from ostinato.engine.params import Completion, SamplingParams, TokenEvent
from ostinato.engine.request import Request
from ostinato.engine.scheduler import PrefillChunk, Scheduler
from ostinato.engine.text import TextStream
from ostinato.graphs import CaptureReport, GraphRunner, StaticBuffers
from ostinato.model import AttentionInputs, Llama, PagedKVCache

Prompt = str | Sequence[int]
_DEFAULT_CHUNK = 512
_CPU_CACHE_BYTES = 4 << 30


@dataclass
class EngineStats:
    """What the engine did since it was made; times in seconds of wall clock."""

    prefill_seconds: list[float] = field(default_factory=list)
    prefill_tokens: int = 0
    decode_seconds: list[float] = field(default_factory=list)
    decode_tokens: int = 0
    preemptions: int = 0


class Engine:
    """Serves many requests at once from one model.

    Call `capture` once, then `generate` or `stream`; or drive it with `submit`, `step` and
    `cancel`. Not thread-safe: one thread owns an engine.

    A request's tokens depend on its prompt and parameters alone, bit for bit: not on the
    requests beside it, the load, preemption or shared prefixes.

    Args:
        model: the decoder; its device is the engine's.
        tokenizer: of the model.
        max_batch: requests that run at once.
        max_context: longest prompt plus text; the model's by default.
        page_size: tokens per KV page.
        num_pages: pages of the KV cache, the dummy page included. By default enough for
            `max_batch` sequences of `max_context`, but at most 80% of the free GPU memory or
            4 GiB of host memory.
        prefill_chunk: prompt tokens computed at once, a multiple of `page_size`; 512 by default.
            Prefixes are shared between prompts in multiples of it.
        max_prefill_tokens: prompt tokens computed in one step over all requests.

    Raises:
        ValueError: when an argument is out of range or the cache could not hold one sequence.
    """

    def __init__(
        self,
        model: Llama,
        tokenizer: Tokenizer,
        *,
        max_batch: int = 32,
        max_context: int | None = None,
        page_size: int = 16,
        num_pages: int | None = None,
        prefill_chunk: int | None = None,
        max_prefill_tokens: int = 2048,
    ) -> None:
        for name, value in (
            ("max_batch", max_batch),
            ("page_size", page_size),
            ("max_prefill_tokens", max_prefill_tokens),
        ):
            if value < 1:
                raise ValueError(f"{name}: got {value}, expected at least 1")
        if max_context is None:
            max_context = model.max_context
        if not 2 <= max_context <= model.max_context:
            raise ValueError(
                f"max_context: got {max_context}, expected 2 to the model's {model.max_context}"
            )
        if prefill_chunk is None:
            prefill_chunk = -(-_DEFAULT_CHUNK // page_size) * page_size
        if prefill_chunk < 1 or prefill_chunk % page_size:
            raise ValueError(
                f"prefill_chunk: got {prefill_chunk}, expected a multiple of page_size={page_size}"
            )
        max_pages = -(-max_context // page_size)
        if num_pages is None:
            num_pages = _default_pages(model, max_batch * max_pages, page_size)
        self.model = model
        self.tokenizer = tokenizer
        self.max_context = max_context
        self.stats = EngineStats()
        self._max_prefill_tokens = max_prefill_tokens
        self.cache = PagedKVCache.for_model(
            model.config, num_pages=num_pages, page_size=page_size, device=model.device
        )
        self._seen = SeenTokens(max_batch, model.config.vocab_size, model.device)
        self._decode = DecodeStep(model, self.cache, self._seen, max_pages)
        buffers = StaticBuffers(self._decode.buffer_specs(), max_batch, model.device)
        self.runner = GraphRunner(self._decode, buffers)
        self._scheduler = Scheduler(self.cache, max_batch=max_batch, prefill_chunk=prefill_chunk)
        self._requests: dict[int, Request] = {}
        self._next_id = 0

    def capture(
        self,
        batch_sizes: Sequence[int] | None = None,
        *,
        progress: bool = True,
        verify: bool = True,
    ) -> CaptureReport:
        """Capture the decode step for each batch size; see `GraphRunner.capture`.

        A step with more requests than the largest size is served in parts.
        """
        return self.runner.capture(batch_sizes, progress=progress, verify=verify)

    def submit(self, prompt: Prompt, params: SamplingParams | None = None) -> int:
        """Queue a request and return its id.

        Raises:
            ValueError: for a prompt that is empty, has ids outside the vocabulary, fills the
                context, or whose text might not fit into the cache even alone.
        """
        return self._enqueue(self._request(prompt, params or SamplingParams()))

    def step(self) -> list[TokenEvent]:
        """Admit requests, compute prompt chunks, decode one token each; return the new tokens.

        Raises:
            ostinato.graphs.NotCapturedError: before `capture`; nothing is changed then.
        """
        self.runner.require_captured()
        scheduler = self._scheduler
        for request in scheduler.admit():
            self._seen.reset(request.slot, [*request.prompt, *request.generated])
        # Decode first, so that a prompt finished in this step waits for the next like any other.
        events = self._decode_step(scheduler.decode_batch())
        chunks = scheduler.prefill_chunks(self._max_prefill_tokens)
        if chunks:
            events += self._prefill_step(chunks)
        self.stats.preemptions = scheduler.preemptions
        return events

    def cancel(self, request_id: int) -> TokenEvent:
        """End a request now and return its last event.

        Raises:
            ValueError: when the id is not that of a waiting or running request.
        """
        request = self._requests.get(request_id)
        if request is None or request.finish_reason is not None:
            raise ValueError(f"request_id: got {request_id}, expected that of a live request")
        event = request.cancel()
        self._scheduler.finish(request)
        return event

    def result(self, request_id: int) -> Completion:
        """Return a finished request's completion, and forget the request.

        Raises:
            ValueError: when the id is unknown or the request has not finished.
        """
        request = self._requests.get(request_id)
        if request is None or request.finish_reason is None:
            raise ValueError(f"request_id: got {request_id}, expected that of a finished request")
        del self._requests[request_id]
        return request.completion()

    @property
    def idle(self) -> bool:
        """Whether every submitted request has finished."""
        return self._scheduler.idle

    def generate(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams]
    ) -> list[Completion]:
        """Serve all prompts and return their completions, in the order of the prompts.

        Args:
            prompts: texts or lists of token ids; more than `max_batch` wait their turn.
            params: for all of them, or one each.

        Raises:
            ValueError: for no prompts, or a prompt that `submit` refuses; none is served then.
        """
        ids = self._submit_all(prompts, params)
        for _ in self._drain(ids):
            pass
        return [self.result(request_id) for request_id in ids]

    def stream(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams]
    ) -> Iterator[TokenEvent]:
        """Serve all prompts, yielding tokens as they come; `request_id` is the prompt's index.

        Arguments and errors are those of `generate`, raised at the call. Closing the iterator
        cancels what is unfinished.
        """
        return self._renumbered(self._submit_all(prompts, params))

    def close(self) -> None:
        """Release the captured graphs; the engine cannot be used afterwards."""
        self.runner.close()

    def _renumbered(self, ids: list[int]) -> Iterator[TokenEvent]:
        index = {request_id: at for at, request_id in enumerate(ids)}
        for event in self._drain(ids):
            if event.finish_reason is not None:
                self.result(event.request_id)
            yield TokenEvent(
                index[event.request_id], event.token_id, event.text, event.finish_reason
            )

    def _submit_all(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams]
    ) -> list[int]:
        if isinstance(prompts, str):
            raise TypeError("prompts: got one string, expected a sequence of prompts")
        if not prompts:
            raise ValueError("prompts: got none, expected at least one")
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(prompts):
            raise ValueError(f"params: got {len(each)}, expected one or {len(prompts)}")
        self.runner.require_captured()
        requests = [self._request(p, q) for p, q in zip(prompts, each, strict=True)]
        return [self._enqueue(request) for request in requests]

    def _drain(self, ids: list[int]) -> Iterator[TokenEvent]:
        pending = set(ids)
        try:
            while pending:
                for event in self.step():
                    if event.request_id in pending:
                        if event.finish_reason is not None:
                            pending.remove(event.request_id)
                        yield event
        finally:
            for request_id in pending:
                request = self._requests[request_id]
                if request.finish_reason is None:
                    self.cancel(request_id)
                del self._requests[request_id]

    def _request(self, prompt: Prompt, params: SamplingParams) -> Request:
        if isinstance(prompt, str):
            tokens = tuple(self.tokenizer.encode(prompt).ids)
        else:
            tokens = tuple(int(token) for token in prompt)
        if not tokens:
            raise ValueError("prompt: got no tokens, expected at least one")
        vocab_size = self.model.config.vocab_size
        strange = [token for token in tokens if not 0 <= token < vocab_size]
        if strange:
            raise ValueError(f"prompt: got token id {strange[0]}, expected 0 to {vocab_size - 1}")
        if len(tokens) >= self.max_context:
            raise ValueError(
                f"prompt: got {len(tokens)} tokens, expected fewer than "
                f"max_context = {self.max_context}"
            )
        max_new_tokens = min(params.max_tokens, self.max_context - len(tokens))
        stop_ids = set(params.stop_token_ids)
        if not params.ignore_eos:
            stop_ids.update(self.model.config.eos_token_ids)
        request = Request(
            id=-1,
            prompt=tokens,
            params=params,
            seed=secrets.randbits(63) if params.seed is None else params.seed,
            max_new_tokens=max_new_tokens,
            stop_ids=frozenset(stop_ids),
            stream=TextStream(self.tokenizer, tokens, params.stop),
        )
        needed = self.cache.pages_for(request.final_length)
        if needed > self.cache.num_pages:
            raise ValueError(
                f"prompt: got {len(tokens)} tokens, which with {max_new_tokens} more need {needed} "
                f"pages; expected at most the cache's {self.cache.num_pages}"
            )
        return request

    def _enqueue(self, request: Request) -> int:
        request.id = self._next_id
        self._next_id += 1
        self._requests[request.id] = request
        self._scheduler.submit(request)
        return request.id

    def _prefill_step(self, chunks: Sequence[PrefillChunk]) -> list[TokenEvent]:
        started = time.perf_counter()
        finished = [c.request for c in chunks if c.stop == len(c.request.prompt)]
        logits = self._prefill(chunks)
        for chunk in chunks:
            self._scheduler.computed(chunk)
        tokens: list[int] = []
        if finished:
            slots = torch.tensor([request.slot for request in finished], device=logits.device)
            sampled = ops.sample(
                logits, seen=self._seen.mask[slots], **sampling_inputs(finished, logits.device)
            )
            tokens = sampled.tolist()
        self.stats.prefill_seconds.append(time.perf_counter() - started)
        self.stats.prefill_tokens += sum(chunk.stop - chunk.start for chunk in chunks)
        return self._accept(finished, tokens)

    def _prefill(self, chunks: Sequence[PrefillChunk]) -> torch.Tensor:
        """Compute the chunks in one varlen call; return logits of the prompts' last tokens."""
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        cu_seqlens = [0]
        last_rows = []
        for chunk in chunks:
            tokens += chunk.request.prompt[chunk.start : chunk.stop]
            positions += range(chunk.start, chunk.stop)
            slots += self.cache.slots(chunk.request.id, chunk.start, chunk.stop)
            cu_seqlens.append(len(tokens))
            if chunk.stop == len(chunk.request.prompt):
                last_rows.append(len(tokens) - 1)
        device = self.model.device
        ids = [chunk.request.id for chunk in chunks]
        seq_lens = [chunk.stop for chunk in chunks]
        attention = AttentionInputs(
            slot_mapping=torch.tensor(slots, device=device),
            page_table=self.cache.page_table(ids, self._decode.max_pages).to(device),
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=device),
            cu_seqlens_q=torch.tensor(cu_seqlens, dtype=torch.int32, device=device),
            # The capacity, not this call's maximum: shapes must not depend on the neighbours.
            max_seqlen_q=self._scheduler.prefill_chunk,
        )
        return self.model(
            torch.tensor(tokens, device=device),
            torch.tensor(positions, dtype=torch.int32, device=device),
            attention,
            self.cache,
            logits_rows=torch.tensor(last_rows, dtype=torch.int64, device=device),
        )

    def _decode_step(self, batch: Sequence[Request]) -> list[TokenEvent]:
        events: list[TokenEvent] = []
        largest = self.runner.max_batch_size
        for at in range(0, len(batch), largest):
            part = batch[at : at + largest]
            started = time.perf_counter()
            outputs = self.runner.run(len(part), self._decode.inputs(part))
            tokens = outputs["tokens"].tolist()
            self.stats.decode_seconds.append(time.perf_counter() - started)
            self.stats.decode_tokens += len(part)
            events += self._accept(part, tokens)
        return events

    def _accept(self, requests: Sequence[Request], tokens: Sequence[int]) -> list[TokenEvent]:
        events = []
        for request, token in zip(requests, tokens, strict=True):
            events.append(request.accept(token))
            if request.finish_reason is not None:
                self._scheduler.finish(request)
        return events


def _default_pages(model: Llama, wanted: int, page_size: int) -> int:
    config = model.config
    page_bytes = 2 * config.num_layers * page_size * config.kv_size * config.dtype.itemsize
    if model.device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(model.device)
        budget = int(free * 0.8)
    else:
        budget = _CPU_CACHE_BYTES
    return 1 + min(wanted, budget // page_bytes)
