"""The tokens of several requests as one iterator."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType

from ostinato.engine.params import Completion, TokenEvent
from ostinato.interrupts import uninterrupted


class TokenStream:
    """Iterates over the events of some prompts, making the engine step when none is waiting.

    An event's `request_id` is the index of its prompt, not the engine's id. Streams of one engine
    may be read by turns, beside `step`. Closing one, also by leaving its `with` block, cancels what
    is unfinished; so does an error or an interrupt while it waits for tokens. What is unfinished
    when a stream is dropped is cancelled before the engine's next step.

    Args:
        ids: the engine's ids of the prompts.
        queue: where the engine puts their events.
        advance: makes the engine step.
        finish: ends a request if it has not ended, forgets it and returns its completion.
        drop: likewise several, but later; it may be called anywhere, from any thread.
    """

    def __init__(
        self,
        ids: Sequence[int],
        queue: deque[TokenEvent],
        *,
        advance: Callable[[], None],
        finish: Callable[[int], Completion],
        drop: Callable[[Iterable[int]], None],
    ) -> None:
        self._advance = advance
        self._finish = finish
        self._drop = drop
        self._index = {request_id: at for at, request_id in enumerate(ids)}
        self._queue = queue
        self._unfinished = set(ids)
        self._completions: dict[int, Completion] = {}

    @property
    def completions(self) -> list[Completion]:
        """The completions so far, in the order of the prompts."""
        return [self._completions[at] for at in sorted(self._completions)]

    def __iter__(self) -> TokenStream:
        return self

    def __next__(self) -> TokenEvent:
        if not self._queue:
            self._wait()
        event = self._queue[0]
        at = self._index[event.request_id]
        if event.finish_reason is not None:
            self._end(event.request_id)
        self._queue.popleft()  # last: until here an interrupt changes nothing
        return TokenEvent(at, event.token_id, event.text, event.finish_reason)

    @uninterrupted
    def close(self) -> None:
        """Cancel what is unfinished; again does nothing."""
        while self._unfinished:
            self._finish(self._unfinished.pop())
        self._queue.clear()

    def __enter__(self) -> TokenStream:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self._drop(self._unfinished)  # at once: Ctrl-C between two would be lost, and the rest

    @uninterrupted
    def _end(self, request_id: int) -> None:
        if request_id in self._unfinished:  # or it was interrupted after this
            self._completions[self._index[request_id]] = self._finish(request_id)
            self._unfinished.remove(request_id)

    def _wait(self) -> None:
        try:
            while self._unfinished and not self._queue:
                self._advance()
        except BaseException:
            self.close()
            raise
        if not self._queue:
            raise StopIteration
