"""A client of streams, cheap enough to be beside a server: HTTP/1.1 on asyncio's sockets."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

_LIMIT = 1 << 20  # bytes of a line


class RefusedError(Exception):
    """A server has answered a request with an error."""


@dataclass
class Stream:
    """What one request saw, in seconds by `time.perf_counter`.

    Args:
        sent: when it was sent.
        times: when each event with a choice came.
        tokens: generated, as the server counts them.
        error: what went wrong, if anything did.
    """

    sent: float
    times: list[float] = field(default_factory=list)
    tokens: int = 0
    error: str | None = None


class Server:
    """Where requests are sent.

    Args:
        url: such as http://localhost:8000; paths begin with /v1 below it.
        api_key: if one is needed.

    Raises:
        ValueError: for an address that is none of HTTP.
    """

    def __init__(self, url: str, api_key: str | None = None) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"url: got {url!r}, expected http://HOST:PORT")
        self._tls = parts.scheme == "https"
        self._host, self._port = parts.hostname, parts.port or (443 if self._tls else 80)
        self._path = parts.path.rstrip("/") + "/v1/completions"
        self._head = f"host: {parts.netloc}\r\n"
        if api_key is not None:
            self._head += f"authorization: Bearer {api_key}\r\n"

    async def stream(self, body: dict[str, Any]) -> Stream:
        """Send a request for a stream and return what came; errors are in the result."""
        seen = Stream(time.perf_counter())
        try:
            await self._send(body, seen)
        except (OSError, EOFError, ValueError, RefusedError) as error:
            seen.error = f"{type(error).__name__}: {error}"[:300]
        return seen

    async def _send(self, body: dict[str, Any], seen: Stream) -> None:
        reader, writer = await asyncio.open_connection(
            self._host, self._port, ssl=self._tls or None, limit=_LIMIT
        )
        try:
            data = json.dumps(body).encode()
            head = (
                f"POST {self._path} HTTP/1.1\r\n{self._head}content-type: application/json\r\n"
                f"content-length: {len(data)}\r\nconnection: close\r\n\r\n"
            )
            writer.write(head.encode() + data)
            await writer.drain()
            status, chunked = await _read_head(reader)
            if status != 200:
                raise RefusedError(
                    f"{status} {(await reader.read(_LIMIT)).decode(errors='replace')}"
                )
            async for event in _events(reader, chunked):
                _note(event, seen)
        finally:
            writer.close()


async def _read_head(reader: asyncio.StreamReader) -> tuple[int, bool]:
    """Return the status, and whether the body comes in chunks."""
    line = await reader.readline()
    if not line.startswith(b"HTTP/1.") or len(line.split()) < 2:
        raise ValueError(f"got {line[:40]!r}, expected an answer of HTTP/1.1")
    status = int(line.split()[1])
    chunked = False
    while (line := await reader.readline()) not in (b"\r\n", b""):
        name, _, value = line.lower().partition(b":")
        chunked |= name == b"transfer-encoding" and b"chunked" in value
    return status, chunked


async def _events(reader: asyncio.StreamReader, chunked: bool) -> AsyncIterator[bytes]:
    """Yield the data of each event; the last one must be [DONE]."""
    text = b""
    while True:
        piece = await _piece(reader, chunked)
        if not piece:
            raise EOFError("the stream ended without [DONE]")
        *lines, text = (text + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                data = line[5:].strip()
                if data == b"[DONE]":
                    return
                yield data


async def _piece(reader: asyncio.StreamReader, chunked: bool) -> bytes:
    if not chunked:
        return await reader.read(_LIMIT)
    size = int((await reader.readline()).split(b";")[0] or b"0", 16)
    data = await reader.readexactly(size)
    await reader.readline()
    return data


def _note(event: bytes, seen: Stream) -> None:
    now = time.perf_counter()
    document = json.loads(event)
    if "error" in document:
        raise RefusedError(str(document["error"]))
    if document.get("choices"):
        seen.times.append(now)
    if document.get("usage"):
        seen.tokens = document["usage"]["completion_tokens"]
