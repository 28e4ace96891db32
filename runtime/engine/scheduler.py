"""Who runs next: admission, chunked prefill, and preemption when pages run out. Host logic only."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ostinato.graphs.arguments import as_integer

from ..models import OutOfPagesError, PagedKVCache
from .request import Request

_DEFAULT_CHUNK = 512


def checked_chunk(given: int | None, page_size: int, unit: int | None = None) -> int:
    """Return the tokens of a prompt that are computed at once, by default 512 or a few more.

    Args:
        given: the argument.
        page_size: of a page.
        unit: that of `cut_unit`. The default is a multiple of it, unless it is larger.

    Raises:
        TypeError, ValueError: naming `prefill_chunk`, for what is no multiple of a page.
    """
    if given is None:
        cuts = page_size if unit is None or unit > _DEFAULT_CHUNK else unit
        return -(-_DEFAULT_CHUNK // cuts) * cuts
    chunk = as_integer("prefill_chunk", given)
    if chunk < 1 or chunk % page_size:
        raise ValueError(
            f"prefill_chunk: got {chunk}, expected a multiple of page_size={page_size}"
        )
    return chunk


def checked_context(given: int | None, own: int) -> int:
    """Return the longest prompt plus text, by default the model's own.

    Raises:
        TypeError, ValueError: naming `max_context`, for what is not 2 to the model's own.
    """
    context = as_integer("max_context", own if given is None else given)
    if not 2 <= context <= own:
        raise ValueError(f"max_context: got {context}, expected 2 to the model's {own}")
    return context


@dataclass(frozen=True)
class PrefillChunk:
    """Prompt positions `start` to `stop` - 1 of a request, to be computed in this step."""

    request: Request
    start: int
    stop: int

    @property
    def ends_prompt(self) -> bool:
        """Whether the chunk is the prompt's last."""
        return self.stop == len(self.request.prompt)


class Scheduler:
    """First come, first served, over a fixed number of slots and pages.

    The oldest running request can always go on, because the newest gives way: its keys and values
    move to host memory and come back bit for bit, so that a preempted text does not change.
    With every request small enough to fit alone (the engine checks), no load deadlocks.

    Args:
        cache: pages for the running requests.
        max_batch: requests that run at once; also the number of slots.
        prefill_chunk: tokens of a prompt computed at once. Chunks begin at multiples of it
            whatever else runs, so that their rounding does not depend on the load either; a prompt
            whose beginning is shared has a shorter first chunk.
        sharing_unit: tokens, a divisor of `prefill_chunk`: prefixes are shared in multiples of it.
            By default whole chunks. Where it is smaller, bits do not depend on which chunks are
            computed as one, and those of a prompt that follow one another are.
        max_tokens_k: what the chunks of a step may see together, each all before its end; None is
            any number. At least that of the longest prompt.

    Attributes:
        joins_chunks: whether chunks of a prompt that follow one another are computed as one.
    """

    def __init__(
        self,
        cache: PagedKVCache,
        *,
        max_batch: int,
        prefill_chunk: int,
        sharing_unit: int | None = None,
        max_tokens_k: int | None = None,
    ) -> None:
        self.cache = cache
        self.prefill_chunk = prefill_chunk
        self._sharing_unit = prefill_chunk if sharing_unit is None else sharing_unit
        self.joins_chunks = self._sharing_unit < prefill_chunk
        self._max_tokens_k = math.inf if max_tokens_k is None else max_tokens_k
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.preemptions = 0
        self._free_slots = list(range(max_batch - 1, -1, -1))

    @property
    def idle(self) -> bool:
        """Whether no request is waiting or running."""
        return not self.waiting and not self.running

    def submit(self, request: Request) -> None:
        """Queue a request."""
        self.waiting.append(request)

    def admit(self) -> None:
        """Move waiting requests into free slots while their pages last."""
        while self.waiting and self._free_slots and self._place(self.waiting[0]):
            request = self.waiting.popleft()
            request.slot = self._free_slots.pop()
            self.running.append(request)

    def prefill_chunks(self, max_tokens: int, beside: int = 0) -> list[PrefillChunk]:
        """Return the next chunks of unfinished prompts, oldest first, up to `max_tokens`.

        `beside` tokens of texts are computed with them, and count.

        All texts wait for these chunks. So it is a quarter while no fewer texts grow than prompts
        wait. With more prompts than texts, fewer tokens are held up in fewer, longer steps: it is
        all of it, or half while more than two such steps wait, since each lets more texts begin,
        which wait for the next. It is all of it, too, for the last prompts of many, in one step:
        if half is enough for them, and they are an eighth of what runs, or more.

        Each has one; where tokens are left all have another turn, and another. The first chunk is
        returned whatever its size.
        """
        chunks: list[PrefillChunk] = []
        places: dict[int, int] = {}  # of the last chunk of each request
        seen = 0
        waiting = deque((r, r.computed) for r in self.running if not r.prefilled)
        left = sum(len(request.prompt) - start for request, start in waiting)
        last = left <= max_tokens // 2 and 8 * len(waiting) >= len(self.running)
        if 2 * len(waiting) <= len(self.running) and not last:
            max_tokens //= 4
        elif left > 2 * max_tokens:
            max_tokens //= 2
        max_tokens -= beside
        while waiting:
            request, start = waiting.popleft()
            whole = start - start % self.prefill_chunk + self.prefill_chunk
            stop = min(whole, len(request.prompt))
            place = places.get(request.id) if self.joins_chunks else None
            max_tokens -= stop - start
            seen += stop if place is None else stop - start
            if chunks and (max_tokens < 0 or seen > self._max_tokens_k):
                break
            if place is None:
                places[request.id] = len(chunks)
                chunks.append(PrefillChunk(request, start, stop))
            else:
                chunks[place] = replace(chunks[place], stop=stop)
            if stop < len(request.prompt):
                waiting.append((request, stop))
        return chunks

    def computed(self, chunks: Sequence[PrefillChunk]) -> None:
        """Record that the keys and values of chunks are in the cache."""
        # Before anything can fail: a prompt's end must not be computed, and sampled, once more.
        for chunk in chunks:
            chunk.request.computed = chunk.stop
        for chunk in chunks:
            # Whole units only: the last bits of keys computed in a partial one (or by a decode
            # step) differ from those a longer prompt would compute for itself.
            whole = chunk.stop - chunk.stop % self._sharing_unit
            self.cache.publish(chunk.request.id, chunk.request.prompt[:whole])

    def decode_batch(self, settle: Callable[[], None] = lambda: None) -> list[Request]:
        """Reserve a slot for one more token of every running request, and return them.

        When pages run out, the newest request is preempted. Requests that have sampled all the
        tokens they may are left out.

        Args:
            settle: called before a request is preempted: reads the tokens in flight, which a
                preempted request must not have, and finishes whom they end.
        """
        batch = []
        for request in list(self.running):
            if self._may_decode(request) and self._grow(request, settle):
                batch.append(request)
        # Those added before pages ran out may have ended since.
        return [request for request in batch if request.slot >= 0]

    def finish(self, request: Request) -> None:
        """Forget a request and free what it holds, wherever it is."""
        if request.slot >= 0:
            self.cache.free(request.id)
            self._release(request)
        else:
            self.waiting.remove(request)
            request.swapped = None

    def _place(self, request: Request) -> bool:
        """Give a waiting request its pages, unless running ones would soon need them back."""
        cache = self.cache
        # What all may ask for in the very next step, this request included.
        headroom = sum(
            cache.pages_for(r.final_length) > len(cache.pages(r.id)) for r in self.running
        )
        next_length = min(request.length + 1, request.final_length)
        headroom += cache.pages_for(next_length) - cache.pages_for(request.length)
        if request.swapped is not None:
            if cache.free_pages < cache.pages_for(request.length) + headroom:
                return False
            cache.swap_in(request.id, request.swapped)
            request.swapped = None
            return True
        # The last prompt token is always computed: its logits are what is sampled from.
        prefix, unit = request.prompt[:-1], self._sharing_unit
        if request.sampling_params.prompt_logprobs is not None:
            prefix = ()  # logits of every token are needed
        # Asked before anything is taken: a try would evict prefixes kept for others.
        needed = cache.pages_to_add(prefix, len(request.prompt), multiple_of=unit)
        if cache.free_pages < needed + headroom:
            return False
        request.computed = cache.add(request.id, prefix, multiple_of=unit)
        try:
            cache.reserve(request.id, len(request.prompt))
        except BaseException:
            cache.free(request.id)
            raise
        return True

    def _may_decode(self, request: Request) -> bool:
        return request.slot >= 0 and request.prefilled and request.sampled < request.max_new_tokens

    def _grow(self, request: Request, settle: Callable[[], None]) -> bool:
        settled = False
        while True:
            try:
                self.cache.reserve(request.id, request.length + 1)
                return True
            except OutOfPagesError:
                if not settled:
                    settle()
                    settled = True
                    if not self._may_decode(request):
                        return False
                    continue
                victim = self.running[-1]
                self._preempt(victim)
                if victim is request:
                    return False

    def _preempt(self, request: Request) -> None:
        self.preemptions += 1
        if request.prefilled:
            request.swapped = self.cache.swap_out(request.id)
        else:
            # Half a prompt is computed again: cheaper than moving it, and to the same bits.
            self.cache.free(request.id)
            request.prompt_rows.clear()  # other chunks may be computed as one next time
        self._release(request)
        self.waiting.appendleft(request)

    def _release(self, request: Request) -> None:
        self.running.remove(request)
        self._free_slots.append(request.slot)
        request.slot, request.marked = -1, False
