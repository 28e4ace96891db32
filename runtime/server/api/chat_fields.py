"""Messages and tools of a chat, and the prompt that a template makes of them."""

from __future__ import annotations

import json
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import Field

from ..chat.render import TemplateFault
from ..errors import ApiError
from ..service import Service
from .fields import Fields


class TextPart(Fields):
    """A piece of a message; others than text are refused."""

    type: Literal["text"]
    text: str


class FunctionCall(Fields):
    """What an assistant has called; `arguments` is a JSON text."""

    name: str
    arguments: str


class ToolCall(Fields):
    """One call of an assistant's message."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None


class Message(Fields):
    """One message; null fields that the openai client copies from an answer are let pass."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(max_length=256, fail_fast=True)] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=128, fail_fast=True)] | None = None
    tool_call_id: str | None = None
    refusal: None = None
    annotations: None = None
    audio: None = None
    function_call: None = None

    def for_template(self) -> dict[str, Any]:
        """Return what a template is given.

        Raises:
            ApiError: when the arguments of a call are no JSON, or there is no content, which only
                an assistant's message may lack.
        """
        content = self.content
        if content is None:
            if self.role != "assistant":
                raise ApiError(
                    400,
                    f"messages: got a message of {self.role!r} without content",
                    param="messages",
                )
            content = ""
        if isinstance(content, list):
            content = "\n".join(part.text for part in content)
        message: dict[str, Any] = {
            "role": "system" if self.role == "developer" else self.role,
            "content": content,
        }
        for field in ("name", "reasoning_content", "tool_call_id"):
            if (value := getattr(self, field)) is not None:
                message[field] = value
        if self.tool_calls:
            message["tool_calls"] = [_for_template(call) for call in self.tool_calls]
        return message


class Function(Fields):
    """A function that a model may call; `parameters` is a JSON schema.

    `strict` is what clients for agents send: nothing holds arguments to the schema.
    """

    name: str = Field(max_length=256)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Fields):
    """One tool."""

    type: Literal["function"]
    function: Function

    def for_template(self) -> dict[str, Any]:
        """Return what a template is given."""
        return self.model_dump(exclude_none=True, exclude={"function": {"strict"}})


class ChatPrompt(Fields):
    """Fields that make the prompt."""

    messages: (
        Annotated[list[Message], Field(min_length=1, max_length=4096, fail_fast=True)] | None
    ) = None
    tools: Annotated[list[Tool], Field(max_length=128, fail_fast=True)] | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


async def rendered(body: ChatPrompt, service: Service, *, tools: bool = True) -> str:
    """Return the prompt as a text.

    Args:
        body: of the request.
        service: which has the template.
        tools: whether the template is told of them.

    Raises:
        ApiError: 400, when there is no template or it refuses the messages.
    """
    if service.template is None:
        raise ApiError(
            400, "messages: the model has no chat template: use /v1/completions", param="messages"
        )
    offered = body.tools if tools else None
    given = body.chat_template_kwargs or {}
    for name in ("messages", "tools", "add_generation_prompt"):
        if name in given:
            raise ApiError(
                400,
                f"chat_template_kwargs: got {name}, which has a field of its own",
                param="chat_template_kwargs",
            )
    try:
        render = partial(
            service.template.render,
            [message.for_template() for message in body.messages or ()],
            tools=[tool.for_template() for tool in offered] if offered else None,
            variables={**given, "add_generation_prompt": body.add_generation_prompt is not False},
        )
        text: str = await service.preparation.run("template", render)
        return text
    except TemplateFault as fault:
        raise ApiError(400, str(fault), param="messages", code="template_error") from None


async def prompt_of(body: ChatPrompt, service: Service, *, special: bool = False) -> list[int]:
    """Return the prompt's token ids.

    Args:
        body: of the request.
        service: which has the template and the tokenizer.
        special: whether the tokenizer adds its special tokens to those that the template writes.

    Raises:
        ApiError: as `rendered`.
    """
    return await service.encode(await rendered(body, service), special=special)


def _for_template(call: ToolCall) -> dict[str, Any]:
    try:
        arguments = json.loads(call.function.arguments or "{}")
    except (ValueError, RecursionError):
        raise ApiError(
            400, "messages: got a tool call whose arguments are no JSON", param="messages"
        ) from None
    function = {"name": call.function.name, "arguments": arguments}
    return {"id": call.id, "type": "function", "function": function}
