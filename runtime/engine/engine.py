"""Continuous batching: prompts in, token events out, over one captured decode step."""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace

from tokenizers import Tokenizer

from ostinato.graphs import CaptureReport, ClosedError, GraphRunner, StaticBuffers
from ostinato.graphs.arguments import as_integer, at_least_one
from ostinato.graphs.capture_plan import BatchSizes
from ostinato.graphs.graph_key import DEFAULT
from ostinato.graphs.guards import ProcessGuard

from .. import ops
from ..interrupts import Uninterrupted, uninterrupted
from ..models import Decoder, PagedKVCache, ScaleKind, compile_kernels, kv_format
from ..ops.implementations import implementations_on
from .async_tokens import AsyncTokens
from .cache_size import MEMORY_FRACTION, check_room, checked_pages
from .capture_examples import CaptureExamples
from .decode_step import DecodeStep, SeenTokens
from .first_tokens import first_tokens
from .grammar import GrammarCompiler
from .logits_processing import PROCESSED, LogitsProcessing
from .logprobs import TokenLogprobs
from .new_request import Prompt, new_request, prompts_with_params
from .prefill_step import Prefill
from .request import Request
from .sampling_params import Completion, FinishReason, SamplingParams, TokenEvent
from .scheduler import PrefillChunk, Scheduler, checked_chunk, checked_context
from .sharing import sharing_unit
from .stats import EngineStats
from .stream import TokenStream
from .upload import by_default_on_the_host


class Engine:
    """Serves many requests at once from one model.

    Call `capture` once, then `generate` or `stream`; or drive it with `submit`, `step` and
    `cancel`. Not thread-safe: one thread owns an engine. Ctrl-C waits for the end of a step, and
    leaves the engine as it is between two; a second one does not wait, and may leave it broken.
    In a fork of the process that made it, `capture`, `submit`, `step`, `generate` and `stream`
    raise ForkedError; `cancel`, `result`, `idle` and `close`, which need no device, do not.

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
            Prefixes are shared between prompts in parts of it (`sharing_unit`).
        max_prefill_tokens: prompt tokens computed in one step over all requests.
        l2_partitioned: as of `PagedKVCache`, on Hopper GPUs; no text depends on it.
        kv_cache_dtype: of the KV cache. "auto" is the 8 bits that the checkpoint is made for, if it
            is, and else the model's dtype; "fp8" and "int8" take half the memory; "bf16", "fp16" or
            "fp32" is the model's dtype, whatever the checkpoint says.
        kv_scales: of 8 bits. "static": the checkpoint's, or of FP8 1; "token": one per token and
            head, computed when it is written. None: the checkpoint's where it has some, else
            "token"; see `kv_format`.
        logits_processing: serve log-probabilities, biases, presence and frequency penalties,
            `min_tokens` and structured texts. Every batch size is captured twice then; steps in
            which no request asks for any of these run the same graphs as without.
        memory_fraction: of a GPU's free memory that pages take at most where `num_pages` is None.

    Attributes:
        grammars: compiles structured texts, from any thread: done before `submit`, that need not
            wait. None without `logits_processing`.

    Raises:
        TypeError, ValueError: when an argument is of the wrong kind or out of range, or there is no
            memory for so many pages or slots.
    """

    @by_default_on_the_host
    def __init__(
        self,
        model: Decoder,
        tokenizer: Tokenizer,
        *,
        max_batch: int = 32,
        max_context: int | None = None,
        page_size: int = 16,
        num_pages: int | None = None,
        prefill_chunk: int | None = None,
        max_prefill_tokens: int = 2048,
        l2_partitioned: bool = True,
        kv_cache_dtype: str = "auto",
        kv_scales: ScaleKind | None = None,
        logits_processing: bool = False,
        memory_fraction: float = MEMORY_FRACTION,
    ) -> None:
        cache_format = kv_format(model.config, model.kv_scales, kv_cache_dtype, kv_scales)
        max_batch = at_least_one("max_batch", max_batch)
        page_size = at_least_one("page_size", page_size)
        max_prefill_tokens = at_least_one("max_prefill_tokens", max_prefill_tokens)
        max_context = checked_context(max_context, model.max_context)
        prefill_chunk = checked_chunk(prefill_chunk, page_size)
        max_pages = -(-max_context // page_size)
        device = model.device
        num_pages = checked_pages(
            *(model.config, cache_format, page_size, device),
            *(num_pages, max_batch * max_pages, memory_fraction),
        )
        # Of each slot the tokens that it has seen, a byte per token of the vocabulary.
        vocab_size = model.config.vocab_size
        processing_bytes = LogitsProcessing.slot_bytes(vocab_size, max_context)
        slot_bytes = vocab_size + (processing_bytes if logits_processing else 0)
        check_room("max_batch", max_batch, slot_bytes, device)
        if not cache_format.is_like(kv_format(model.config, model.kv_scales)):
            compile_kernels(model, cache_format)  # the others `load_model` compiles
        self.model = model
        self.tokenizer = tokenizer
        self.max_context = max_context
        self.stats = EngineStats()
        self._max_prefill_tokens = max_prefill_tokens
        self.cache = PagedKVCache.for_model(
            model.config,
            num_pages=num_pages,
            page_size=page_size,
            device=device,
            l2_partitioned=l2_partitioned,
            kv_format=cache_format,
        )
        self._seen = SeenTokens(max_batch, vocab_size, device)
        self._processing: LogitsProcessing | None = None
        self.grammars: GrammarCompiler | None = None
        if logits_processing:
            sizes = (max_batch, vocab_size, max_context)
            self._processing = LogitsProcessing(*sizes, device)
            self.grammars = GrammarCompiler(tokenizer, vocab_size, model.config.eos_token_ids)
        longest = max_context - 1  # of a prompt
        max_tokens = max(max_prefill_tokens, min(prefill_chunk, longest))
        max_tokens = min(max_tokens, max_batch * longest)
        # For examples: a page table without repetitions, and slots enough for all tokens.
        self._capture_examples = CaptureExamples(
            self.cache, max_pages + max(max_batch, self.cache.pages_for(max_tokens))
        )
        self._decode = DecodeStep(
            *(model, self.cache, self._seen, max_pages),
            capture_examples=self._capture_examples,
            processing=self._processing,
        )
        buffers = StaticBuffers(self._decode.buffer_specs(), max_batch, model.device)
        self.runner = GraphRunner(self._decode, buffers, memory=self._decode.memory())
        chunks = {"max_batch": max_batch, "prefill_chunk": prefill_chunk}
        unit = sharing_unit(model, self.cache, prefill_chunk)
        self._scheduler = Scheduler(self.cache, sharing_unit=unit, **chunks)
        self._prefill = Prefill(
            model,
            self.cache,
            max_pages=max_pages,
            max_chunk=prefill_chunk,
            max_tokens=max_tokens,
            # Of each request's last chunk, and of whole ones.
            max_chunks=max_batch + max_tokens // prefill_chunk,
            capture_examples=self._capture_examples,
        )
        self._async_tokens = AsyncTokens(model.device)
        self._requests: dict[int, Request] = {}
        # Events wait here for whoever asks next: requests of a stream have a queue of their own.
        self._events: deque[TokenEvent] = deque()
        self._queues: dict[int, deque[TokenEvent]] = {}
        # Streams and their unfinished requests, and those streams that were dropped: the garbage
        # collector may do it in the middle of a step, and on any thread.
        self._streams: dict[weakref.ref[TokenStream], set[int]] = {}
        self._dropped: deque[weakref.ref[TokenStream]] = deque()
        self._next_id = 0
        self._closed = False
        self._process = ProcessGuard("engine")

    @by_default_on_the_host
    def capture(
        self,
        batch_sizes: Sequence[int] | None = None,
        *,
        progress: bool = True,
        verify: bool = True,
    ) -> CaptureReport:
        """Capture the decode step for each batch size, and prompts; see `GraphRunner.capture`.

        A step with more requests than the largest size is served in parts. On CUDA what computes
        prompts is captured for some numbers of tokens up to the most of a step; in the report these
        graphs are of the variant "prefill", and come first; steps that process logits are of the
        variant "processed". Its notes say which ops run on kernels and which on torch's operators,
        and how the KV cache stores numbers. Verification works on free pages of the cache, filled
        with random numbers.

        Raises:
            RuntimeError: while requests are running.
            ValueError, ostinato.graphs.GraphError: as `GraphRunner.capture`, which is not to be
                called in `torch.autocast`.
        """
        self._process.check()
        self._finish_dropped()
        if self._scheduler.running:
            raise RuntimeError("capture: requests are running; finish or cancel them first")
        self._async_tokens.clear()  # tokens of cancelled requests, in memory of the old graphs
        # Only verification draws examples; lending takes pages that were kept for prefixes.
        sizes: BatchSizes = batch_sizes
        with ExitStack() as examples:
            if verify:
                examples.enter_context(self._capture_examples.lent())
            if self._processing is not None:
                sizes = {DEFAULT: batch_sizes, PROCESSED: batch_sizes}
                if verify:
                    examples.enter_context(self._processing.examples())
            steps = self.runner.capture(sizes, progress=progress, verify=verify)
            prompts = self._prefill.capture(progress=progress, verify=verify)
        report = steps if prompts is None else prompts + steps
        notes = implementations_on(self.model.device)
        return replace(report, notes={**notes, "KV cache": str(self.cache.format)})

    def submit(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> int:
        """Queue a request and return its id. When it has finished, `result` forgets it.

        Raises:
            TypeError: for a prompt that is no text and no sequence of integers, or for
                `sampling_params` of another type.
            ValueError: for a prompt that is empty, no valid Unicode, has ids outside the
                vocabulary, fills the context, or whose text might not fit into the cache even
                alone; for stop ids outside the vocabulary, and a stop string that has a special
                token in it but is none.
            ClosedError: after `close`.
            ForkedError: in a fork of the process.
        """
        self._process.check()
        if self._closed:
            raise ClosedError("the engine is closed: make a new Engine")
        request = self._request(
            prompt, SamplingParams() if sampling_params is None else sampling_params
        )
        try:
            return self._enqueue(request)
        except BaseException:
            self._forget(request)  # its caller has no id to cancel it by
            raise

    def step(self) -> list[TokenEvent]:
        """Admit requests, decode one token each, compute prompt chunks; return the new tokens.

        The device works on this step while the host reads the tokens of the one before, so these
        are the tokens of the step before. Tokens of `stream` and `generate` are not among them:
        these go to their stream, whoever makes the step.

        Raises:
            ostinato.graphs.GraphError: before `capture`, or in a fork of the process; nothing is
                changed then.
        """
        self._advance()
        events, none = list(self._events), deque[TokenEvent]()
        self._events = none  # Python looks for Ctrl-C at calls: from here on there is none
        return events

    @uninterrupted
    def cancel(self, request_id: int) -> TokenEvent:
        """End a request now and return its last event, which `step` does not return again.

        Its text is all that no earlier event holds: tokens that `step` has not returned yet have
        no other event.

        Raises:
            TypeError, ValueError: when the id is not that of a waiting or running request.
        """
        request_id = as_integer("request_id", request_id)
        request = self._requests.get(request_id)
        if request is None or request.finish_reason is not None:
            raise ValueError(f"request_id: got {request_id}, expected that of a live request")
        try:
            event = request.cancel()
        finally:
            self._scheduler.finish(request)
        if request_id in self._queues:
            self._queues[request_id].append(event)
            return event
        unread = [waiting for waiting in self._events if waiting.request_id == request_id]
        for waiting in unread:
            self._events.remove(waiting)
        return replace(event, text="".join(e.text for e in (*unread, event)))

    def result(self, request_id: int) -> Completion:
        """Return a finished request's completion, and forget the request.

        Raises:
            TypeError, ValueError: when the id is unknown or the request has not finished.
        """
        request_id = as_integer("request_id", request_id)
        request = self._requests.get(request_id)
        if request is None or request.finish_reason is None:
            raise ValueError(f"request_id: got {request_id}, expected that of a finished request")
        completion = request.completion()
        del self._requests[request_id]
        return completion

    @property
    def waiting(self) -> int:
        """Requests that wait for a slot or for pages."""
        return len(self._scheduler.waiting)

    @property
    def idle(self) -> bool:
        """Whether every submitted request has finished, and `step` has returned its last event."""
        self._finish_dropped()
        return self._scheduler.idle and not self._events

    def generate(
        self, prompts: Sequence[Prompt], sampling_params: SamplingParams | Sequence[SamplingParams]
    ) -> list[Completion]:
        """Serve all prompts and return their completions, in the order of the prompts.

        Args:
            prompts: texts or lists of token ids; more than `max_batch` wait their turn.
            sampling_params: for all of them, or one each.

        Raises:
            TypeError, ValueError: for no prompts, or one that `submit` refuses; none is served.
        """
        with self.stream(prompts, sampling_params) as stream:
            for _ in stream:
                pass
            return stream.completions

    def stream(
        self, prompts: Sequence[Prompt], sampling_params: SamplingParams | Sequence[SamplingParams]
    ) -> TokenStream:
        """Serve all prompts, yielding tokens as they come; see `TokenStream`.

        Arguments and errors are those of `generate`, raised at the call.
        """
        self._require_captured()
        pairs = prompts_with_params(prompts, sampling_params)
        requests = [self._request(prompt, params) for prompt, params in pairs]
        queue: deque[TokenEvent] = deque()
        with Uninterrupted():
            ids = [self._enqueue(request) for request in requests]
            self._queues.update(dict.fromkeys(ids, queue))
            stream = TokenStream(ids, queue, advance=self._advance, finish=self._finish_streamed)
            # Its end runs no line of Python, in which Ctrl-C could come and be lost.
            self._streams[weakref.ref(stream, self._dropped.append)] = stream.unfinished
            return stream

    def close(self) -> None:
        """Release the captured graphs; the engine cannot be used afterwards.

        In a fork of the process nothing is released: the graphs are the parent's.
        """
        self._closed = True
        if not self._process.is_fork:
            self._async_tokens.clear()
            if self.grammars is not None:
                self.grammars.close()
        self.runner.close()
        self._prefill.close()

    @uninterrupted
    def _finish_streamed(self, request_id: int) -> Completion:
        try:
            if self._requests[request_id].finish_reason is None:
                self.cancel(request_id)
        finally:
            del self._queues[request_id]
            completion = self.result(request_id)
        return completion

    def _finish_dropped(self) -> None:
        if not self._dropped:
            return
        with Uninterrupted():
            while self._dropped:
                unfinished = self._streams[self._dropped[0]]
                while unfinished:
                    self._finish_streamed(unfinished.pop())
                # Not before: behind an error the others are finished by the next call.
                del self._streams[self._dropped.popleft()]

    @uninterrupted
    def _forget(self, request: Request) -> None:
        if request.id in self._requests:
            self.cancel(request.id)
            self.result(request.id)

    def _require_captured(self) -> None:
        self._process.check()
        self.runner.require_captured()
        self._prefill.require_captured()

    @uninterrupted
    @by_default_on_the_host
    def _advance(self) -> None:
        self._capture_examples.end()
        self._require_captured()
        self._finish_dropped()
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
            self._read_tokens()  # the next token depends on the last, by way of the host
        batch = scheduler.decode_batch(settle=self._read_tokens)
        launched_before = len(self._async_tokens)
        # Decode first, so that a prompt finished in this step waits for the next like any other.
        try:
            self._decode_step(batch)
        finally:
            # Also after an error: the next run overwrites what these tokens were copied from.
            self._read_tokens(launched_before)
        chunks = scheduler.prefill_chunks(self._max_prefill_tokens)
        if chunks:
            self._prefill_step(chunks)
        self.stats.preemptions = scheduler.preemptions

    def _request(self, prompt: Prompt, sampling_params: SamplingParams) -> Request:
        return new_request(
            prompt,
            sampling_params,
            tokenizer=self.tokenizer,
            config=self.model.config,
            cache=self.cache,
            max_context=self.max_context,
            grammars=self.grammars,
        )

    @uninterrupted
    def _enqueue(self, request: Request) -> int:
        request.id = self._next_id
        self._next_id += 1
        self._requests[request.id] = request
        self._scheduler.submit(request)
        return request.id

    def _prefill_step(self, chunks: Sequence[PrefillChunk]) -> None:
        started = time.perf_counter()
        finished = [chunk.request for chunk in chunks if chunk.ends_prompt]
        logits = self._prefill.compute(chunks)
        # Chunks that end no prompt are launches, too: the host waits for them as for any other,
        # and so is one step ahead of the device at most.
        tokens, logprobs = first_tokens(finished, logits, self._seen, self._processing)
        seconds = self.stats.prefill_seconds
        self._async_tokens.add(finished, tokens, seconds, started, logprobs)
        # Only now: after an error the prompt is computed again, first token and all.
        self._scheduler.computed(chunks)
        self.stats.prefill_tokens += sum(chunk.stop - chunk.start for chunk in chunks)

    def _decode_step(self, batch: Sequence[Request]) -> None:
        if not batch:
            return
        largest = self.runner.max_batch_size
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
                outputs = self.runner.run(len(part), inputs, variant=PROCESSED)
                logprobs = ops.RowLogprobs(outputs["logprobs"], outputs["logprob_ids"])
            else:
                outputs = self.runner.run(len(part), inputs)
            tokens = outputs["tokens"]
            if len(batch) > largest:
                tokens = tokens.clone()  # the next part's run overwrites them
            self._async_tokens.add(part, tokens, self.stats.decode_seconds, started, logprobs)

    def _read_tokens(self, count: int | None = None) -> None:
        """Read the tokens of the oldest `count` launches, by default of all."""
        self._async_tokens.read(self._accept, count)

    def _accept(self, request: Request, token: int, logprobs: TokenLogprobs | None) -> None:
        # Without a token where logits are NaN.
        event = request.fail() if token < 0 else request.accept(token, logprobs)
        if request.finish_reason is FinishReason.ERROR:
            self.stats.failed_requests += 1
        elif len(request.generated) > 1:  # the first is the prompt's
            self.stats.decode_tokens += 1
        self._queues.get(request.id, self._events).append(event)
        if request.finish_reason is not None:
            self._scheduler.finish(request)
