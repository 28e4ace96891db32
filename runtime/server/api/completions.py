"""/v1/completions: prompts go on as texts."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import BeforeValidator

from ..errors import ApiError
from ..generation import Generation
from ..service import Service
from .dependencies import Served
from .events import EventStream, answer
from .fields import SamplingFields, checked_max_tokens, sampling_params, unsupported
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
    max_tokens: int | None = None
    echo: bool = False
    logprobs: int | None = None
    add_special_tokens: bool = True


@ROUTER.post("/v1/completions")
async def completions(body: CompletionRequest, request: Request, service: Served) -> Response:
    """Continue each prompt `n` times."""
    service.check_model(body.model)
    if body.logprobs is not None:
        raise unsupported("logprobs")
    with_usage = body.usage_in_stream
    prompts = await _encoded(body, service)
    choices = body.n or 1
    _check_count(len(prompts) * choices, service)
    params = []
    for prompt in prompts:
        most = checked_max_tokens(
            body.max_tokens, len(prompt), service.max_context, _DEFAULT_TOKENS
        )
        params += sampling_params(body, most, service.defaults, choices)
    repeated = [prompt for prompt in prompts for _ in range(choices)]
    echoes = await _echoes(body, prompts, service) if body.echo else None
    generation = await service.generate(repeated, params)
    document = {
        "id": f"cmpl-{secrets.token_hex(12)}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": body.model or service.models[0],
    }
    prompt_tokens = sum(map(len, prompts))
    log = request.scope["ostinato"]
    if body.stream:
        chunks = _chunks(generation, document, echoes, choices, prompt_tokens, with_usage, log)
        return EventStream(generation, chunks)
    whole = _whole(generation, document, echoes, choices, prompt_tokens, log)
    return await answer(request, generation, whole)


async def _encoded(body: CompletionRequest, service: Service) -> list[list[int]]:
    _check_count(len(body.prompt), service)
    return [
        await service.encode(prompt, special=body.add_special_tokens)
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


async def _whole(
    generation: Generation,
    document: dict[str, Any],
    echoes: Sequence[str] | None,
    choices: int,
    prompt_tokens: int,
    log: dict[str, Any],
) -> dict[str, Any]:
    count = len(generation.prompt_tokens)
    texts = [[] if echoes is None else [echoes[at // choices]] for at in range(count)]
    reasons: list[str | None] = [None] * count
    async for events in generation:
        for progress in events:
            texts[progress.choice].append(progress.event.text)
            reasons[progress.choice] = finish_reason(progress.event)
    used = usage(prompt_tokens, generation, log)
    return {
        **document,
        "choices": [
            _choice(at, "".join(text), reason)
            for at, (text, reason) in enumerate(zip(texts, reasons, strict=True))
        ],
        "usage": used,
    }


async def _chunks(
    generation: Generation,
    document: dict[str, Any],
    echoes: Sequence[str] | None,
    choices: int,
    prompt_tokens: int,
    with_usage: bool,
    log: dict[str, Any],
) -> AsyncGenerator[dict[str, Any], None]:
    none = {"usage": None} if with_usage else {}
    if echoes is not None:
        for at in range(len(generation.prompt_tokens)):
            yield {**document, "choices": [_choice(at, echoes[at // choices], None)], **none}
    async for events in generation:
        for progress in events:
            event = progress.event
            choice = _choice(progress.choice, event.text, finish_reason(event))
            yield {**document, "choices": [choice], **none}
    used = usage(prompt_tokens, generation, log)
    if with_usage:
        yield {**document, "choices": [], "usage": used}


def _choice(index: int, text: str, reason: str | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": reason}
