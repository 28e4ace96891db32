"""/v1/chat/completions: messages are answered by a message."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any, Literal

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Field, model_validator

from ...engine import TokenEvent
from ...engine.logprobs import MOST_LOGPROBS
from ..chat.message import Delta, MessageReader
from ..errors import ApiError
from ..generation import Generation, by_choice
from ..logprobs import TokenTexts, chat_logprobs
from .chat_fields import ChatPrompt, rendered
from .dependencies import Served
from .events import EventStream, answer
from .fields import SamplingFields, sampling_params
from .usage import finish_reason, usage

ROUTER = APIRouter()


class ChatRequest(SamplingFields, ChatPrompt):
    """The body of a request."""

    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: Literal[True] | None = None
    add_special_tokens: bool | None = None

    @model_validator(mode="after")
    def _check_messages(self) -> ChatRequest:
        if self.messages is None:
            raise ValueError("messages: expected a list of messages")
        return self


@ROUTER.post("/v1/chat/completions")
async def chat(body: ChatRequest, request: Request, service: Served) -> Response:
    """Answer the messages `n` times."""
    service.check_model(body.model)
    _check_supported(body)
    with_usage = body.usage_in_stream
    choices = body.n or 1
    if choices > service.settings.max_choices:
        raise ApiError(
            400, f"n: got {choices}, expected at most {service.settings.max_choices}", param="n"
        )
    with_tools = body.tool_choice != "none"
    text = await rendered(body, service, tools=with_tools)
    prompt = await service.encode(text, special=bool(body.add_special_tokens))
    most = body.checked_max_tokens(len(prompt), service.max_context, service.max_context)
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    params = sampling_params(body, most, service.defaults, choices, logprobs=logprobs)
    names = {tool.function.name for tool in body.tools or () if with_tools}
    # A form holds from the first token on, so that such a text has no reasoning.
    thinking = params[0].structured is None and text.rstrip().endswith("<think>")
    readers = [MessageReader(service.parsers, names, thinking=thinking) for _ in range(choices)]
    generation = await service.generate([prompt] * choices, params, form_field=body.form_field)
    document = {
        "id": f"chatcmpl-{secrets.token_hex(12)}",
        "object": "chat.completion.chunk" if body.stream else "chat.completion",
        "created": int(time.time()),
        "model": body.model or service.models[0],
    }
    log = request.scope["ostinato"]
    if body.stream:
        chunks = _chunks(
            generation, document, readers, service.token_texts, len(prompt), with_usage, log
        )
        return EventStream(generation, chunks)
    whole = _whole(generation, document, readers, service.token_texts, len(prompt), log)
    return await answer(request, generation, whole)


def _check_supported(body: ChatRequest) -> None:
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs: expected logprobs to be true", param="top_logprobs")
    if body.tool_choice not in (None, "none", "auto"):
        raise ApiError(
            400,
            f"tool_choice: got {str(body.tool_choice)[:100]!r}, expected 'none' or 'auto'",
            param="tool_choice",
            code="unsupported_field",
        )


async def _whole(
    generation: Generation,
    document: dict[str, Any],
    readers: list[MessageReader],
    texts: TokenTexts,
    prompt_tokens: int,
    log: dict[str, Any],
) -> dict[str, Any]:
    deltas: list[list[Delta]] = [[] for _ in readers]
    reasons: list[str | None] = [None] * len(readers)
    told: list[list[TokenEvent]] = [[] for _ in readers]
    async for events in generation:
        for progress in events:
            at, reason = progress.choice, finish_reason(progress.event)
            told[at].append(progress.event)
            deltas[at] += readers[at].push(progress.event.text, last=reason is not None)
            reasons[at] = reason
    return {
        **document,
        "choices": [
            {
                "index": at,
                "message": _message(deltas[at]),
                "logprobs": _logprobs(texts, told[at]),
                "finish_reason": _reason(reasons[at], reader),
            }
            for at, reader in enumerate(readers)
        ],
        "usage": usage(prompt_tokens, generation, log),
    }


def _message(deltas: list[Delta]) -> dict[str, Any]:
    content = "".join(delta.content for delta in deltas)
    reasoning = "".join(delta.reasoning for delta in deltas)
    calls = [delta.call for delta in deltas if delta.call is not None]
    message: dict[str, Any] = {
        "role": "assistant",
        "content": None if calls and not content else content,
    }
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = calls
    return message


async def _chunks(
    generation: Generation,
    document: dict[str, Any],
    readers: list[MessageReader],
    texts: TokenTexts,
    prompt_tokens: int,
    with_usage: bool,
    log: dict[str, Any],
) -> AsyncGenerator[dict[str, Any], None]:
    none = {"usage": None} if with_usage else {}
    begun: set[int] = set()

    def chunk(
        at: int,
        delta: dict[str, Any],
        reason: str | None = None,
        logprobs: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        choice = {"index": at, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        return {**document, "choices": [choice], **none}

    async for events in generation:
        for at, new in by_choice(events).items():
            reason = finish_reason(new[-1].event)
            if at not in begun:
                begun.add(at)
                yield chunk(at, {"role": "assistant", "content": ""})
            reader, calls = readers[at], readers[at].calls
            logprobs = _logprobs(texts, [progress.event for progress in new])
            text = "".join(progress.event.text for progress in new)
            deltas = reader.push(text, last=reason is not None)
            if logprobs is not None and not deltas:
                deltas = [Delta()]  # they come with their token, be its text held back
            for delta in deltas:
                yield chunk(at, _document(delta, calls), logprobs=logprobs)
                calls += delta.call is not None
                logprobs = None
            if reason is not None:
                yield chunk(at, {}, _reason(reason, reader))
    used = usage(prompt_tokens, generation, log)
    if with_usage:
        yield {**document, "choices": [], "usage": used}


def _logprobs(texts: TokenTexts, events: Sequence[TokenEvent]) -> dict[str, Any] | None:
    """Return the log-probabilities of events' tokens; None where none were asked for."""
    tokens = [
        (event.token_id, event.logprobs)
        for event in events
        if event.token_id is not None and event.logprobs is not None
    ]
    return chat_logprobs(texts, tokens) if tokens else None


def _document(delta: Delta, index: int) -> dict[str, Any]:
    if delta.call is not None:
        return {"tool_calls": [{"index": index, **delta.call}]}
    if delta.reasoning:
        return {"reasoning_content": delta.reasoning}
    return {"content": delta.content}


def _reason(reason: str | None, reader: MessageReader) -> str | None:
    return "tool_calls" if reason == "stop" and reader.calls else reason
