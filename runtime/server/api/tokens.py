"""/tokenize and /detokenize, in vLLM's shape."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import Field

from ..errors import ApiError
from .chat_fields import ChatPrompt, prompt_of
from .dependencies import Served
from .fields import Fields

ROUTER = APIRouter()


class TokenizeRequest(ChatPrompt):
    """A prompt, or messages of a chat."""

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None


class DetokenizeRequest(Fields):
    """Token ids."""

    model: str | None = None
    tokens: Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(fail_fast=True)]


@ROUTER.post("/tokenize")
async def tokenize(body: TokenizeRequest, service: Served) -> dict[str, Any]:
    """Return the token ids of a text, or of a chat as its template writes it."""
    service.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "prompt: expected either prompt or messages", param="prompt")
    if body.prompt is not None:
        special = body.add_special_tokens is not False
        ids = await service.encode(body.prompt, special=special)
    else:
        ids = await prompt_of(body, service, special=bool(body.add_special_tokens))
    return {"tokens": ids, "count": len(ids), "max_model_len": service.max_context}


@ROUTER.post("/detokenize")
async def detokenize(body: DetokenizeRequest, service: Served) -> dict[str, str]:
    """Return the text of token ids, special tokens included."""
    service.check_model(body.model)
    return {"prompt": await service.decode(body.tokens)}
