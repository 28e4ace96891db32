"""Files of requests, in OpenAI's batch format: answered in their order."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from starlette.types import Message

from .app import create_app
from .errors import error_body
from .service import Service

_PATHS = ("/v1/completions", "/v1/chat/completions")
_MOST_BYTES = 64 << 20  # of a line
_BEGINNING = b'{"id": "'  # of an answer


class BatchError(ValueError):
    """A file of answers does not fit the file of requests."""


def read_lines(stream: BinaryIO) -> Iterator[bytes]:
    """Yield the lines of a file that are not blank.

    Raises:
        BatchError: for a line that is too long.
    """
    while line := stream.readline(_MOST_BYTES + 1):
        if len(line) > _MOST_BYTES:
            raise BatchError(f"got a line of more than {_MOST_BYTES} bytes")
        if line.strip():
            yield line


def finished_lines(requests: BinaryIO, answers: Path) -> int:
    """Return how many requests a file of answers has, and cut off what a kill left half written.

    Args:
        requests: the file of requests, from its beginning.
        answers: is left as it is where it is anything else than such a file.

    Raises:
        BatchError: when a line is not the answer to the request in its place.
        OSError: when a file cannot be read or cut.
    """
    count = end = 0
    questions = read_lines(requests)
    with open(answers, "rb+") as told:
        while line := told.readline(_MOST_BYTES + 1):
            if not line.endswith(b"\n"):
                if not line[: len(_BEGINNING)] == _BEGINNING[: len(line)]:
                    raise BatchError(f"line {count + 1} is no answer")
                break
            question = next(questions, None)
            if question is None or _answered_id(line) != _custom_id(question):
                raise BatchError(f"line {count + 1} is not the answer to the request in its place")
            count, end = count + 1, end + len(line)
        told.truncate(end)
    return count


async def run_batch(
    service: Service, lines: Iterable[bytes], write: Callable[[str], None], *, at_once: int
) -> int:
    """Answer requests and write the answers, in the order of the requests.

    Args:
        service: answers them.
        lines: a request each, `{"custom_id": ..., "method": "POST", "url": ..., "body": {...}}`.
        write: takes one answer, a line without its end.
        at_once: requests in work.

    Returns:
        How many requests were refused or have failed.
    """
    app = create_app(service)
    running: deque[asyncio.Task[dict[str, Any]]] = deque()
    failed = 0

    async def tell() -> None:
        nonlocal failed
        answer = await running[0]
        running.popleft()
        failed += answer["response"]["status_code"] != 200
        write(json.dumps(answer))

    try:
        for line in lines:
            if len(running) >= at_once:
                await tell()
            running.append(asyncio.create_task(_answer(app, line)))
        while running:
            await tell()
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    return failed


async def _answer(app: Callable[..., Any], line: bytes) -> dict[str, Any]:
    name, status = None, 400
    document: dict[str, Any]
    try:
        request = json.loads(line)
        name = request["custom_id"]
        if request.get("method", "POST") != "POST" or request["url"] not in _PATHS:
            raise ValueError(f"method, url: expected POST and {' or '.join(_PATHS)}")
        if request["body"].get("stream"):
            raise ValueError("stream: got true, expected a whole answer")
        status, document = await _post(app, request["url"], json.dumps(request["body"]).encode())
    except (ValueError, RecursionError) as error:
        document = error_body(status, f"line: {error}")
    except (KeyError, TypeError, AttributeError) as error:
        document = error_body(
            status, f"line: expected custom_id, method, url and body: {type(error).__name__}"
        )
    response = {"status_code": status, "request_id": secrets.token_hex(16), "body": document}
    return {"id": secrets.token_hex(16), "custom_id": name, "response": response, "error": None}


async def _post(app: Callable[..., Any], path: str, body: bytes) -> tuple[int, dict[str, Any]]:
    """Send a request to the application, past any socket."""
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
        ],
    }
    request: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
    sent: list[Message] = []
    forever = asyncio.Event()

    async def receive() -> Message:
        if not request:
            await forever.wait()  # nobody leaves
        return request.pop()

    async def send(message: Message) -> None:
        sent.append(message)

    await app(scope, receive, send)
    text = b"".join(message.get("body", b"") for message in sent)
    return sent[0]["status"], json.loads(text)


def _answered_id(line: bytes) -> Any:
    """Return the custom_id of an answer's request; a line that is none has another than any."""
    try:
        answer = json.loads(line)
        return answer["custom_id"] if "response" in answer and "id" in answer else object()
    except (ValueError, KeyError, TypeError, RecursionError):
        return object()


def _custom_id(line: bytes) -> Any:
    try:
        return json.loads(line)["custom_id"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
