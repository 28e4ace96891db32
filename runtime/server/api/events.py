"""Server-sent events, and answers that end when the client leaves."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import Response
from starlette.types import Message, Receive, Scope, Send

from ..documents import JsonAnswer, json_bytes
from ..errors import ApiError, error_body
from ..generation import Generation

T = TypeVar("T")
_LOG = logging.getLogger("ostinato.server")
_DONE = b"data: [DONE]\n\n"
_GRACE = 5.0  # seconds beyond a request's deadline for its client to read what there is
# Of a request whose client has left; it is not sent, but logged.
_CLIENT_LEFT = 499


class EventStream(Response):
    """An answer of server-sent events, which ends with [DONE]; after an error, with its event.

    Args:
        generation: is closed in any case, also when the client leaves.
        chunks: JSON documents made of its events.
    """

    media_type = "text/event-stream"

    def __init__(
        self, generation: Generation, chunks: AsyncGenerator[dict[str, Any], None]
    ) -> None:
        super().__init__(headers={"cache-control": "no-store"})
        del self.headers["content-length"]
        self._generation = generation
        self._chunks = chunks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events."""
        try:
            # Not within `_chunks`: one that has not begun would not close it.
            async with self._generation, asyncio.timeout_at(self._generation.deadline + _GRACE):
                await until_gone(self._send(send), receive)
        except TimeoutError:
            # Nobody reads: the connection is broken, which uvicorn does after an exception.
            raise ConnectionAbortedError("a client did not read its answer in time") from None

    async def _send(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        async with aclosing(self._chunks) as chunks:
            await send(start)
            try:
                async for chunk in chunks:
                    await send(_event(chunk))
            except ApiError as error:
                await send(_event(error.body()))
            except Exception:
                _LOG.exception("an internal error in a stream")
                await send(_event(error_body(500, "an internal error", code="internal_error")))
        await send({"type": "http.response.body", "body": _DONE})


async def answer(
    request: Request, generation: Generation, work: Coroutine[Any, Any, dict[str, Any]]
) -> Response:
    """Return what `work` makes of a generation as JSON; both end when the client leaves."""
    async with generation:
        document = await until_gone(work, request.receive)
    return JsonAnswer(document) if document is not None else Response(status_code=_CLIENT_LEFT)


async def until_gone(work: Coroutine[Any, Any, T], receive: Receive) -> T | None:
    """Do some work and return its result, or cancel it when the client leaves and return None."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _event(document: dict[str, Any]) -> Message:
    body = b"data: " + json_bytes(document) + b"\n\n"
    return {"type": "http.response.body", "body": body, "more_body": True}
