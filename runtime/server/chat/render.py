"""Chat templates, rendered in a process of their own."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_WORKER = Path(__file__).with_name("worker.py")
_START_TIMEOUT = 30.0  # seconds for Python and jinja2 to be there
_PIECE = 1 << 20


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
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def thinks(self) -> bool:
        """Whether a template speaks of reasoning between <think> and </think>."""
        return any("<think>" in text or "</think>" in text for text in self._templates.values())

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
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
        line = json.dumps(order).encode() + b"\n"
        with self._lock:
            try:
                answer = json.loads(self._ask(line))
            except BaseException:
                self._end()  # it may be anywhere in its work
                raise
        if "error" in answer:
            raise TemplateFault(f"messages: the chat template refuses them: {answer['error']}")
        text: str = answer["text"]
        return text

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._end()

    def _ask(self, line: bytes) -> bytes:
        if self._process is None:
            self._start(json.dumps(self._templates).encode() + b"\n")
        return self._exchange(line, self._timeout)

    def _exchange(self, line: bytes, seconds: float) -> bytes:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        try:
            process.stdin.write(line)
            process.stdin.flush()
        except BrokenPipeError:
            raise TemplateFault("messages: the chat template has ended its process") from None
        return self._read_line(process, seconds)

    def _start(self, line: bytes) -> None:
        environment = {k: v for k, v in os.environ.items() if k != "OSTINATO_API_KEY"}
        # -P: the folder of the program is no place to import from.
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(_WORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            start_new_session=True,  # Ctrl-C is for the server
        )
        self._exchange(line, _START_TIMEOUT)

    def _read_line(self, process: subprocess.Popen[bytes], seconds: float) -> bytes:
        assert process.stdout is not None
        deadline = time.monotonic() + seconds
        pieces = []
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while True:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise TemplateFault(f"messages: the chat template took longer than {seconds} s")
                piece = os.read(process.stdout.fileno(), _PIECE)
                if not piece:
                    raise TemplateFault("messages: the chat template took too much memory or time")
                pieces.append(piece)
                if piece.endswith(b"\n"):
                    return b"".join(pieces)

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.communicate()
