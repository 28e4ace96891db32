"""Reads a growing text as a message: reasoning, content and tool calls."""

from __future__ import annotations

import json
import secrets
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from .parsers import HERMES, JSON, Parsers

_THINK, _END_THINK = "<think>", "</think>"
_CALL, _END_CALL = "<tool_call>", "</tool_call>"


@dataclass(frozen=True)
class Delta:
    """What a message grows by: one of these.

    Args:
        content: of the answer.
        reasoning: before it.
        call: a whole tool call in OpenAI's shape, without its index.
    """

    content: str = ""
    reasoning: str = ""
    call: dict[str, Any] | None = None


class MessageReader:
    """Turns pieces of a text into deltas as soon as they are certain.

    Args:
        parsers: of reasoning and, where there are tools, of calls.
        tools: names of the functions that may be called; none: texts have no calls.
        thinking: whether the prompt has opened <think> already.
    """

    def __init__(self, parsers: Parsers, tools: Collection[str], *, thinking: bool = False) -> None:
        self._tools = tools
        self._parser = parsers.tools if tools else None
        self._state = "content" if parsers.reasoning is None else "start"
        if thinking and parsers.reasoning is not None:
            self._state = "reasoning"
        self._text = ""  # not told yet
        self._blank = ""  # content that is not told where a call follows, or where one came before
        self._began = False  # whether content has been told since the last call
        self.calls = 0

    def push(self, text: str, *, last: bool = False) -> list[Delta]:
        """Add a piece of the text; behind the `last` one nothing is held back."""
        self._text += text
        deltas: list[Delta] = []
        while (more := self._next(last)) is not None:
            deltas += more
        if last and not self.calls:
            deltas.append(Delta(content=self._blank))
        return [delta for delta in deltas if delta != Delta()]

    def _next(self, last: bool) -> list[Delta] | None:
        """Take one step; None where it waits for more text."""
        step = {
            "start": self._start,
            "reasoning": self._reasoning,
            "behind reasoning": self._behind_reasoning,
            "content": self._content,
            "call": self._call,
        }[self._state]
        return step(last)

    def _start(self, last: bool) -> list[Delta] | None:
        """Look whether the text begins with reasoning."""
        stripped = self._text.lstrip()
        if stripped.startswith(_THINK):
            self._text, self._state = stripped.removeprefix(_THINK), "reasoning"
        elif last or not _THINK.startswith(stripped):
            self._state = "content"
        else:
            return None
        return []

    def _reasoning(self, last: bool) -> list[Delta] | None:
        reasoning, end, rest = self._text.partition(_END_THINK)
        if end:
            self._text, self._state = rest, "behind reasoning"
            return [Delta(reasoning=reasoning)]
        told = self._certain(_END_THINK, last)
        return [Delta(reasoning=told)] if told else None

    def _behind_reasoning(self, last: bool) -> list[Delta] | None:
        """Skip the empty lines between reasoning and content."""
        self._text = self._text.lstrip("\n")
        if not self._text and not last:
            return None
        self._state = "content"
        return []

    def _content(self, last: bool) -> list[Delta] | None:
        if self._parser == JSON and not self._began:
            return self._only_calls(last)
        if self._parser != HERMES:
            told, self._text = self._text, ""
            return [Delta(content=told)] if told else None
        content, begins, rest = self._text.partition(_CALL)
        if begins:
            self._text, self._state = rest, "call"
            return self._tell(content)
        told = self._certain(_CALL, last)
        return self._tell(told) if told else None

    def _call(self, last: bool) -> list[Delta] | None:
        inside, end, rest = self._text.partition(_END_CALL)
        if not end and not last:
            return None
        self._text, self._state = rest if end else "", "content"
        calls = self._calls(inside)
        if not calls:
            return self._tell(_CALL + inside + end)
        self._blank, self._began = "", False
        return calls

    def _tell(self, content: str) -> list[Delta]:
        """Return content, but for blank lines around calls: they are held back until words come."""
        told = self._blank + content
        self._began = self._began or bool(told.strip())
        self._blank = "" if self._began else told
        return [Delta(content=told)] if self._began else []

    def _only_calls(self, last: bool) -> list[Delta] | None:
        """Read a text that is either calls and nothing else, or content."""
        stripped = self._text.lstrip()
        if not last and (not stripped or stripped[0] in "[{"):
            return None
        calls = self._calls(stripped) if last else []
        if calls:
            self._text = ""
            return calls
        self._began = True
        return []

    def _certain(self, marker: str, last: bool) -> str:
        """Take the text but for what may be the beginning of a marker."""
        held = 0
        if not last:
            held = next(
                (n for n in range(len(marker) - 1, 0, -1) if self._text.endswith(marker[:n])), 0
            )
        told = self._text[: len(self._text) - held]
        self._text = self._text[len(told) :]
        return told

    def _calls(self, text: str) -> list[Delta]:
        """Return the calls that a JSON text holds; none where it is anything else."""
        try:
            document = json.loads(text)
        except (ValueError, RecursionError):
            return []
        documents = document if isinstance(document, list) else [document]
        calls = [self._call_of(item) for item in documents]
        if None in calls or not calls:
            return []
        self.calls += len(calls)
        return [Delta(call=call) for call in calls]

    def _call_of(self, item: Any) -> dict[str, Any] | None:
        name = item.get("name") if isinstance(item, dict) else None
        if not isinstance(name, str) or name not in self._tools:
            return None
        arguments = item.get("arguments", item.get("parameters", {}))
        if not isinstance(arguments, str):
            try:
                arguments = _json(arguments)
            except ValueError:  # infinity or NaN, which JSON does not have
                return None
        return {
            "id": f"call_{secrets.token_hex(12)}",
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        }


def _json(value: Any) -> str:
    """Return a value as JSON, with halves of characters as escapes."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value)
    return text
