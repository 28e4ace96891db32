"""The tokens of several requests as one iterator."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import TracebackType

from ..interrupts import uninterrupted
from .sampling_params import Completion, TokenEvent


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

    Attributes:
        unfinished: the engine's ids of those that have not been finished so.
    """

    def __init__(
        self,
        ids: Sequence[int],
        queue: deque[TokenEvent],
        *,
        advance: Callable[[], None],
        finish: Callable[[int], Completion],
    ) -> None:
        self._advance = advance
        self._finish = finish
        self._index = {request_id: at for at, request_id in enumerate(ids)}
        self._queue = queue
        self.unfinished = set(ids)
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
        told = replace(event, request_id=at)
        # Last: until here Ctrl-C loses nothing, and from here on Python looks for none.
        del self._queue[0]
        return told

    @uninterrupted
    def close(self) -> None:
        """Cancel what is unfinished; again does nothing."""
        while self.unfinished:
            self._finish(self.unfinished.pop())
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

    @uninterrupted
    def _end(self, request_id: int) -> None:
        if request_id in self.unfinished:  # or it was interrupted after this
            self._completions[self._index[request_id]] = self._finish(request_id)
            self.unfinished.remove(request_id)

    def _wait(self) -> None:
        try:
            while self.unfinished and not self._queue:
                self._advance()
        except BaseException:
            self.close()
            raise
        if not self._queue:
            raise StopIteration
