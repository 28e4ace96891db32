"""Chat templates, rendered in a process of their own."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ...line_process import LineProcess, NoAnswerError, Silence

_WORKER = Path(__file__).with_name("worker.py")
_START_TIMEOUT = 30.0  # seconds for Python and jinja2 to be there


class TemplateFault(ValueError):
    """A template cannot write these messages, or takes too long or too much memory."""


class ChatTemplate:
    """The chat templates of a model.

    The process is started by the first `render`, and anew when it has been ended. Thread-safe: one
    call at a time.

    Args:
        templates: by name, "default" among them; "tool_use" is taken where there are tools.
        special_tokens: variables such as `bos_token`.
        timeout: seconds for one rendering.
    """

    def __init__(
        self, templates: Mapping[str, str], special_tokens: Mapping[str, str], timeout: float
    ) -> None:
        self._templates = dict(templates)
        self._special_tokens = dict(special_tokens)
        self._timeout = timeout
        self._lock = threading.Lock()
        self._process: LineProcess | None = None

    @property
    def text(self) -> str:
        """All templates, one after the other."""
        return "\n".join(self._templates.values())

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        """Return the prompt that the messages make.

        Args:
            messages: with role and content.
            tools: that the model may call, in OpenAI's shape.
            variables: of the template besides these and the special tokens, such as
                `add_generation_prompt`.

        Raises:
            TemplateFault: saying what is wrong.
        """
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        names = {**variables, **self._special_tokens, "messages": messages, "tools": tools}
        order = {"template": name, "variables": names, "seconds": self._timeout}
        line = json.dumps(order).encode()
        with self._lock:
            try:
                answer = json.loads(self._answer(line))
            except BaseException as error:
                self._end()  # it may be anywhere in its work
                if isinstance(error, NoAnswerError):
                    raise TemplateFault(f"messages: {self._fault(error.reason)}") from None
                raise
        if "error" in answer:
            raise TemplateFault(f"messages: the chat template refuses them: {answer['error']}")
        text: str = answer["text"]
        return text

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._end()

    def _answer(self, line: bytes) -> bytes:
        try:
            return self._ask(line)
        except NoAnswerError as error:
            if error.reason is not Silence.GONE:
                raise
            self._end()  # somebody, such as a system without memory, had ended it since
            return self._ask(line)

    def _ask(self, line: bytes) -> bytes:
        if self._process is None:
            environment = {k: v for k, v in os.environ.items() if k != "OSTINATO_API_KEY"}
            self._process = LineProcess(_WORKER, environment)
            self._process.ask(json.dumps(self._templates).encode(), _START_TIMEOUT)
        return self._process.ask(line, self._timeout)

    def _fault(self, reason: Silence) -> str:
        if reason is Silence.GONE:
            return "the chat template has ended its process"
        if reason is Silence.ENDED:
            return "the chat template took too much memory or time"
        return f"the chat template took longer than {self._timeout} s"

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.end()
