"""Continuous batching: prompts in, token events out, over one captured decode step."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from tokenizers import Tokenizer

from ostinato.graphs import CaptureReport, ClosedError, GraphRunner, StaticBuffers
from ostinato.graphs.arguments import as_integer
from ostinato.graphs.guards import ProcessGuard

from ..interrupts import Uninterrupted, uninterrupted
from ..models import Decoder, PagedKVCache, ScaleKind, compile_kernels, kv_format
from ..parallel import Ranks
from .cache_size import MEMORY_FRACTION
from .capture_examples import CaptureExamples
from .captures import Captures
from .decode_step import DecodeStep, SeenTokens
from .engine_sizes import EngineSizes
from .launches import Launches
from .logits_processing import LogitsProcessing
from .logprobs import TokenLogprobs
from .new_request import Grammars, Prompt, new_request, prompts_with_params
from .prefill_step import Prefill
from .ranks.calls import STEP, RankCalls, calls_of
from .ranks.follower import follow
from .request import Request
from .sampling_params import Completion, FinishReason, SamplingParams, TokenEvent
from .scheduler import Scheduler
from .stats import EngineStats
from .stream import TokenStream
from .structured.grammar import GrammarCompiler
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

    Over several `ranks` every process makes an engine with the same arguments. Rank 0's is used as
    any other; on the others `follow` does what rank 0 is called for. When a rank is lost,
    `capture`, `step`, `generate` and `stream` raise RankError; the engine is of no more use.

    Args:
        model: the decoder; its device is the engine's.
        tokenizer: of the model.
        max_batch: requests that run at once.
        max_context: longest prompt plus text; the model's by default.
        page_size: tokens per KV page.
        num_pages: pages of the KV cache, the dummy page included. By default enough for
            `max_batch` sequences of `max_context`, but at most 80% of the free GPU memory or
            4 GiB of host memory.
        prefill_chunk: prompt tokens computed at once, a multiple of `page_size`; by default 512, or
            576 to 768 where attention cuts prompts at multiples of 192 or 384 (`cut_unit`), in
            parts of which prompts share prefixes then.
        max_prefill_tokens: tokens of a step with prompts; a quarter or half of it beside texts.
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
        ranks: the processes whose models communicate, for one engine at a time.

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
        max_prefill_tokens: int = 8192,
        l2_partitioned: bool = True,
        kv_cache_dtype: str = "auto",
        kv_scales: ScaleKind | None = None,
        logits_processing: bool = False,
        memory_fraction: float = MEMORY_FRACTION,
        ranks: Ranks | None = None,
    ) -> None:
        self._calls = calls_of(ranks)
        sizes = EngineSizes.of(
            *(model, self._calls),
            max_batch=max_batch,
            max_context=max_context,
            page_size=page_size,
            num_pages=num_pages,
            prefill_chunk=prefill_chunk,
            max_prefill_tokens=max_prefill_tokens,
            kv_cache_dtype=kv_cache_dtype,
            kv_scales=kv_scales,
            logits_processing=logits_processing,
            memory_fraction=memory_fraction,
        )
        if not sizes.kv_format.is_like(kv_format(model.config, model.kv_scales)):
            compile_kernels(model, sizes.kv_format)  # the others `load_model` compiles
        device, vocab_size = model.device, model.config.vocab_size
        self.model = model
        self.tokenizer = tokenizer
        self.max_context = sizes.max_context
        self.stats = EngineStats()
        self.cache = PagedKVCache.for_model(
            model.config,
            num_pages=sizes.num_pages,
            page_size=sizes.page_size,
            device=device,
            l2_partitioned=l2_partitioned,
            one_order=self._calls.compares,
            kv_format=sizes.kv_format,
        )
        max_batch = sizes.max_batch
        self._seen = SeenTokens(max_batch, vocab_size, device)
        self._processing: LogitsProcessing | None = None
        self.grammars: GrammarCompiler | None = None
        if logits_processing:
            self._processing = LogitsProcessing(max_batch, vocab_size, sizes.max_context, device)
            self.grammars = GrammarCompiler(tokenizer, vocab_size, model.config.eos_token_ids)
        # For examples: a page table without repetitions, and slots enough for all tokens.
        self._capture_examples = CaptureExamples(
            self.cache, sizes.max_pages + self.cache.pages_for(sizes.max_tokens)
        )
        self._decode = DecodeStep(
            *(model, self.cache, self._seen, sizes.max_pages),
            capture_examples=self._capture_examples,
            processing=self._processing,
        )
        buffers = StaticBuffers(self._decode.buffer_specs(), max_batch, model.device)
        self.runner = GraphRunner(
            self._decode, buffers, memory=self._decode.memory(), group=self._calls.group
        )
        chunk = sizes.prefill_chunk
        self._scheduler = Scheduler(
            self.cache,
            max_batch=max_batch,
            prefill_chunk=chunk,
            sharing_unit=sizes.sharing_unit,
            max_tokens_k=sizes.max_tokens_k,
        )
        self._prefill = Prefill(
            *(model, self.cache, self._seen),
            sizes=sizes,
            # The op's capacity, by which torch's operators take their time.
            max_chunk=sizes.max_tokens if self._scheduler.joins_chunks else chunk,
            capture_examples=self._capture_examples,
            group=self._calls.group,
        )
        self._captures = Captures(
            *(self.runner, self._prefill, self._capture_examples, self._processing),
            *(self.cache, max_batch),
        )
        self._launches = Launches(
            *(self.runner, self._decode, self._prefill),
            model=model,
            seen=self._seen,
            processing=self._processing,
            scheduler=self._scheduler,
            cache=self.cache,
            stats=self.stats,
            calls=self._calls,
            max_prefill_tokens=sizes.max_prefill_tokens,
        )
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
        prompts, and texts beside them, is captured for some numbers of tokens up to the most of a
        step; in the report these graphs are of the variant "prefill", and come first; steps that
        process logits are of the variant "processed". Its notes say which ops run on kernels and
        which on torch's operators, and how the KV cache stores numbers. Verification works on free
        pages of the cache, filled with random numbers.

        Raises:
            RuntimeError: while requests are running.
            ValueError, ostinato.graphs.GraphError: as `GraphRunner.capture`, which is not to be
                called in `torch.autocast`.
        """
        self._require_still("capture")
        self._captures.check(batch_sizes)  # before other ranks begin
        sizes = None if batch_sizes is None else [int(size) for size in batch_sizes]
        with self._calls.together("capture", batch_sizes=sizes, verify=verify):
            return self._captures.capture(batch_sizes, progress=progress, verify=verify)

    def sleep(self) -> None:
        """Release the captured graphs and their memory until `wake`; see `GraphRunner.sleep`.

        Raises:
            RuntimeError: while requests are running.
            ostinato.graphs.GraphError: before `capture`.
        """
        self._require_still("sleep")
        self._require_captured()
        with self._calls.together("sleep"):
            self._captures.sleep()

    @by_default_on_the_host
    def wake(self, *, progress: bool = True, verify: bool = True) -> CaptureReport:
        """Repeat the last capture after `sleep`; see `GraphRunner.wake`."""
        self._require_still("wake")
        with self._calls.together("wake", verify=verify):
            return self._captures.capture(None, progress=progress, verify=verify, wakes=True)

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
        self._calls.require_leading("submit")
        if self._closed:
            raise ClosedError("the engine is closed: make a new Engine")
        params = SamplingParams() if sampling_params is None else sampling_params
        request = self._request(prompt, params)
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
            self._calls.ended("cancel", request_id)
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
        self._calls.require_leading("stream")
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

    def follow(self) -> None:
        """Do what rank 0's engine is called for, on another rank, until that one is closed.

        Ctrl-C and SIGTERM are left to rank 0 meanwhile.

        Raises:
            ostinato.graphs.RankError: when a rank is lost.
            RuntimeError: on rank 0, or without `ranks`.
        """
        if not isinstance(self._calls, RankCalls) or self._calls.leads:
            raise RuntimeError("follow: called on rank 0, expected one of the other ranks")
        follow(self, self._calls, self._request, self._enqueue, self._fail)

    def close(self) -> None:
        """Release the captured graphs; the engine cannot be used afterwards.

        In a fork of the process nothing is released: the graphs are the parent's.
        """
        if not self._process.is_fork:
            self._calls.close()
        self._closed = True
        if not self._process.is_fork:
            self._launches.clear()
            if self.grammars is not None:
                self.grammars.close()
        self._captures.close(in_fork=self._process.is_fork)

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

    def _require_still(self, call: str) -> None:
        """Check that no request is running, and forget tokens of cancelled ones."""
        self._process.check()
        self._finish_dropped()
        if self._scheduler.running:
            raise RuntimeError(f"{call}: requests are running; finish or cancel them first")
        self._launches.clear()  # they are in memory of the graphs

    @uninterrupted
    @by_default_on_the_host
    def _advance(self) -> None:
        self._capture_examples.end()
        self._require_captured()
        self._finish_dropped()
        if self._calls.leads and self._calls.compares:
            self._end_overdue()
        with self._calls.together(STEP):
            self._launches.step(self._accept)

    def _end_overdue(self) -> None:
        """End texts whose grammars take too long on this rank, rank 0, also on the others."""
        for request in list(self._scheduler.running):
            if request.matcher is not None and request.matcher.overdue:
                self._fail(request.id)
                self._calls.ended("fail", request.id)

    def _fail(self, request_id: int) -> None:
        self._accept(self._requests[request_id], -1, None)

    def _request(
        self, prompt: Prompt, params: SamplingParams, grammars: Grammars | None = None
    ) -> Request:
        return new_request(
            *(prompt, params),
            tokenizer=self.tokenizer,
            config=self.model.config,
            cache=self.cache,
            max_context=self.max_context,
            grammars=grammars or self.grammars,
            timed=not self._calls.compares,
        )

    @uninterrupted
    def _enqueue(self, request: Request) -> int:
        request.id = self._next_id
        self._next_id += 1
        self._requests[request.id] = request
        self._scheduler.submit(request)
        self._calls.submitted(request)
        return request.id

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
