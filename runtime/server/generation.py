"""One request of a client, from its admission to its last event."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from types import TracebackType

from ..engine import FinishReason, SamplingParams
from .errors import (
    ApiError,
    EngineError,
    bad_form,
    bad_value,
    engine_ended,
    late,
    stopping,
)
from .jobs import Accepted, Ended, EngineLink, Job, Message, OnLoop, Progress
from .metrics import Metrics


class Admission:
    """Counts the choices that are being served, and refuses those beyond a limit.

    Args:
        most: choices that run or wait at once.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.taken = 0
        self.draining = False

    def take(self, count: int) -> None:
        """Admit so many choices.

        Raises:
            ApiError: 400 when so many never fit, 429 when they do not fit now, 503 while the
                server drains.
        """
        if self.draining:
            raise stopping()
        if count > self.most:
            raise ApiError(
                400, f"n: got {count} texts, expected at most {self.most} at once", param="n"
            )
        if self.taken + count > self.most:
            raise ApiError(
                429,
                "the queue is full: try again later",
                code="queue_full",
                headers={"retry-after": "1"},
            )
        self.taken += count


def by_choice(events: Iterable[Progress]) -> dict[int, list[Progress]]:
    """Return the events of each choice: one, or more where a client is told less often."""
    found: dict[int, list[Progress]] = {}
    for progress in events:
        found.setdefault(progress.choice, []).append(progress)
    return found


class Generation:
    """Asynchronous iterator over the events of a request's choices, as lists of what has come.

    `start` admits and submits it; `close`, or leaving its `async with` block, cancels what is
    unfinished.

    Args:
        engine: serves it.
        admission: admits it.
        metrics: are told its times.
        prompts: token ids of each choice.
        params: of each choice.
        deadline: by the loop's clock, when it is ended with an error.
        form_field: the request's field that holds the form of its texts.
    """

    def __init__(
        self,
        engine: EngineLink,
        admission: Admission,
        metrics: Metrics,
        prompts: Sequence[Sequence[int]],
        params: Sequence[SamplingParams],
        deadline: float,
        *,
        form_field: str = "structured_outputs",
    ) -> None:
        loop = self._loop = asyncio.get_running_loop()
        self._engine = engine
        self._admission = admission
        self._metrics = metrics
        self._form_field = form_field
        self._job = Job(prompts, params, OnLoop(loop), self._take)
        self._arrived = loop.time()
        self._last = self._arrived
        self.deadline = deadline
        self._pending: list[Message] = []
        self._waiter: asyncio.Future[None] | None = None
        # One timer for the whole request: one for each of its tokens costs more than the token.
        self._timer = loop.call_at(self.deadline, self._expire)
        self._late = False
        self._unfinished = 0
        self._admitted = 0
        self.completion_tokens = [0] * len(prompts)

    async def start(self) -> None:
        """Submit the request and wait until the engine has queued or refused it.

        Raises:
            ApiError: when it is refused.
        """
        count = len(self._job.prompts)
        self._admission.take(count)
        self._admitted = self._unfinished = count
        try:
            self._engine.submit(self._job)
            (first,) = await self._next(1)
            if isinstance(first, Ended):
                raise self._error(first)
            assert isinstance(first, Accepted)
        except BaseException:
            self.close()
            raise

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> list[Progress]:
        if not self._unfinished:
            raise StopAsyncIteration
        messages = await self._next()
        events: list[Progress] = []
        for message in messages:
            if isinstance(message, Progress):
                events.append(message)
            elif isinstance(message, Ended):
                raise self._error(message)
        for message in events:
            self.completion_tokens[message.choice] += message.event.token_id is not None
            if message.event.finish_reason is None:
                continue
            self._unfinished -= 1
            if message.event.finish_reason is FinishReason.ERROR:
                raise self._failed(message.event.error or "")
        self._observe()
        return events

    def close(self) -> None:
        """Cancel what is unfinished and give the places in the queue back; again does nothing."""
        self._timer.cancel()
        if self._unfinished:
            self._engine.cancel(self._job)
            self._unfinished = 0
        self._admission.taken -= self._admitted
        self._admitted = 0

    async def __aenter__(self) -> Generation:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _take(self, messages: list[Message]) -> None:
        self._pending.extend(messages)
        self._wake()

    def _expire(self) -> None:
        self._late = True
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _next(self, most: int | None = None) -> list[Message]:
        """Wait for messages and return them all, or the first `most`."""
        while not self._pending:
            if self._late:
                raise late()
            self._waiter = self._loop.create_future()
            await self._waiter
        taken = self._pending[:most]
        del self._pending[: len(taken)]
        return taken

    def _failed(self, error: str) -> ApiError:
        """Return the answer to a text that the engine could not go on with."""
        argument, _, problem = error.partition(": ")
        if argument == "structured":
            return bad_form(self._form_field, problem)
        return self._error(Ended(EngineError(error)))

    def _error(self, ended: Ended) -> ApiError:
        if isinstance(ended.error, EngineError):
            return engine_ended(ended.error, draining=self._admission.draining)
        return bad_value(ended.error)

    def _observe(self) -> None:
        now = self._loop.time()
        if self._last == self._arrived:
            self._metrics.first_token.observe(now - self._arrived)
        else:
            self._metrics.inter_token.observe(now - self._last)
        self._last = now
        if not self._unfinished:
            self._metrics.request.observe(now - self._arrived)
            # Choices of one prompt have the same list.
            prompts = {id(prompt): len(prompt) for prompt in self._job.prompts}
            self._metrics.prompt_tokens.inc(sum(prompts.values()))
            self._metrics.completion_tokens.inc(sum(self.completion_tokens))
