"""/v1/completions: prompts go on as texts."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import BeforeValidator, Field

from ...engine.logprobs import MOST_LOGPROBS
from ..errors import ApiError
from ..generation import Generation, by_choice
from ..jobs import Progress
from ..logprobs import CompletionLogprobs
from ..service import Service
from .dependencies import Served
from .events import EventStream, answer
from .fields import SamplingFields, sampling_params
from .usage import finish_reason, usage

ROUTER = APIRouter()
_DEFAULT_TOKENS = 16  # OpenAI's


def _prompts(value: Any) -> list[Any]:
    """Return the prompts that a field holds: a text, token ids, or a list of either."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if all(type(item) is int for item in value):
            return [value]
        if all(isinstance(item, str) for item in value):
            return value
        if all(isinstance(item, list) for item in value) and all(
            type(token) is int for item in value for token in item
        ):
            return value
    raise ValueError("expected a text, a list of texts, token ids, or a list of lists of them")


class CompletionRequest(SamplingFields):
    """The body of a request."""

    prompt: Annotated[Any, BeforeValidator(_prompts)]
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)
    add_special_tokens: bool | None = None


@ROUTER.post("/v1/completions")
async def completions(body: CompletionRequest, request: Request, service: Served) -> Response:
    """Continue each prompt `n` times."""
    service.check_model(body.model)
    with_usage = body.usage_in_stream
    prompts = await _encoded(body, service)
    choices = body.n or 1
    _check_count(len(prompts) * choices, service)
    params = []
    for prompt in prompts:
        most = body.checked_max_tokens(len(prompt), service.max_context, _DEFAULT_TOKENS)
        params += sampling_params(
            body,
            most,
            service.defaults,
            choices,
            logprobs=body.logprobs,
            prompt_logprobs=body.logprobs if body.echo else None,
        )
    repeated = [prompt for prompt in prompts for _ in range(choices)]
    echoes = await _echoes(body, prompts, service) if body.echo else None
    texts = [
        _Choice(
            at,
            None if echoes is None else echoes[at // choices],
            None if body.logprobs is None else CompletionLogprobs(service.token_texts),
            prompt,
        )
        for at, prompt in enumerate(repeated)
    ]
    generation = await service.generate(repeated, params, form_field=body.form_field)
    document = {
        "id": f"cmpl-{secrets.token_hex(12)}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": body.model or service.models[0],
    }
    prompt_tokens = sum(map(len, prompts))
    log = request.scope["ostinato"]
    if body.stream:
        chunks = _chunks(generation, document, texts, prompt_tokens, with_usage, log)
        return EventStream(generation, chunks)
    whole = _whole(generation, document, texts, prompt_tokens, log)
    return await answer(request, generation, whole)


async def _encoded(body: CompletionRequest, service: Service) -> list[list[int]]:
    _check_count(len(body.prompt), service)
    return [
        await service.encode(prompt, special=body.add_special_tokens is not False)
        if isinstance(prompt, str)
        else prompt
        for prompt in body.prompt
    ]


def _check_count(choices: int, service: Service) -> None:
    if choices > service.settings.max_choices:
        raise ApiError(
            400,
            f"n: got {choices} texts, expected at most {service.settings.max_choices} per request",
            param="n",
        )


async def _echoes(
    body: CompletionRequest, prompts: Sequence[Sequence[int]], service: Service
) -> list[str]:
    """Return the text of each prompt."""
    return [
        given if isinstance(given, str) else await service.decode(ids)
        for given, ids in zip(body.prompt, prompts, strict=True)
    ]


class _Choice:
    """One text of an answer, with its prompt where that is echoed.

    Args:
        index: in the answer.
        echo: the prompt's text; None where it is not echoed.
        logprobs: where they are asked for.
        prompt: token ids.
    """

    def __init__(
        self,
        index: int,
        echo: str | None,
        logprobs: CompletionLogprobs | None,
        prompt: Sequence[int],
    ) -> None:
        self._index = index
        self._echo = echo
        self._logprobs = logprobs
        self._prompt = prompt
        # The log-probabilities of an echoed prompt come with the end of its text.
        self.waits = echo is not None and logprobs is not None
        self.echoes_at_once = echo is not None and logprobs is None

    def of(self, events: Sequence[Progress]) -> dict[str, Any]:
        """Return what the answer grows by with these events; the first call has the echo."""
        text, self._echo = self._echo or "", None
        if self.waits:
            self._add_prompt(events[-1])
        reason = None
        for progress in events:
            text += progress.event.text
            reason = finish_reason(progress.event)
            if self._logprobs is not None and progress.event.token_id is not None:
                self._logprobs.add(progress.event.token_id, progress.event.logprobs)
        logprobs = None if self._logprobs is None else self._logprobs.taken()
        return {"index": self._index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def _add_prompt(self, last: Progress) -> None:
        assert last.completion is not None
        assert self._logprobs is not None
        for token, own in zip(self._prompt, last.completion.prompt_logprobs or (), strict=False):
            self._logprobs.add(token, own)


async def _whole(
    generation: Generation,
    document: dict[str, Any],
    choices: Sequence[_Choice],
    prompt_tokens: int,
    log: dict[str, Any],
) -> dict[str, Any]:
    told: list[list[Progress]] = [[] for _ in choices]
    async for events in generation:
        for progress in events:
            told[progress.choice].append(progress)
    used = usage(prompt_tokens, generation, log)
    return {
        **document,
        "choices": [choice.of(its) for choice, its in zip(choices, told, strict=True)],
        "usage": used,
    }


async def _chunks(
    generation: Generation,
    document: dict[str, Any],
    choices: Sequence[_Choice],
    prompt_tokens: int,
    with_usage: bool,
    log: dict[str, Any],
) -> AsyncGenerator[dict[str, Any], None]:
    none = {"usage": None} if with_usage else {}
    waiting: list[list[Progress]] = [[] for _ in choices]
    for choice in choices:
        if choice.echoes_at_once:
            yield {**document, "choices": [choice.of([])], **none}
    async for events in generation:
        for at, new in by_choice(events).items():
            choice, its = choices[at], waiting[at]
            its += new
            if choice.waits and new[-1].completion is None:
                continue
            yield {**document, "choices": [choice.of(its)], **none}
            its.clear()
    used = usage(prompt_tokens, generation, log)
    if with_usage:
        yield {**document, "choices": [], "usage": used}
