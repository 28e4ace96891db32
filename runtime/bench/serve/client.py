"""A client of streams, cheap enough to be beside a server: HTTP/1.1 on asyncio's sockets."""

from __future__ import annotations

import asyncio
import json
import time
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
        loop = asyncio.get_running_loop()
        transport, answer = await loop.create_connection(
            lambda: _Answer(seen), self._host, self._port, ssl=self._tls or None
        )
        try:
            data = json.dumps(body).encode()
            head = (
                f"POST {self._path} HTTP/1.1\r\n{self._head}content-type: application/json\r\n"
                f"content-length: {len(data)}\r\nconnection: close\r\n\r\n"
            )
            transport.write(head.encode() + data)
            await answer.ended
        finally:
            transport.close()


class _Answer(asyncio.BufferedProtocol):
    """Notes the events of an answer as they come; `ended` is done behind the last, or an error.

    Not a reader that is awaited for each line, nor a buffer for each piece: of hundreds of streams
    that would be slower than the server.
    """

    _buffer = memoryview(bytearray(1 << 16))  # for one piece, which is read before the next comes

    def __init__(self, seen: Stream) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._seen = seen
        self._raw = b""  # that has come and was not read
        self._status = 0
        self._chunked = False
        self._left = 0  # bytes of the chunk
        self._body = bytearray()  # behind the last whole line

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return where the next piece goes."""
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Read what has come."""
        if self.ended.done():
            return
        try:
            self._raw += self._buffer[:nbytes]
            if self._status or self._read_head():
                self._read_body()
        except (ValueError, RefusedError) as error:
            self.ended.set_exception(error)

    def connection_lost(self, error: Exception | None) -> None:
        """End what has not ended."""
        if self.ended.done():
            return
        if self._status not in (0, 200):
            error = RefusedError(f"{self._status} {self._body.decode(errors='replace')}")
        self.ended.set_exception(error or EOFError("the stream ended without [DONE]"))

    def _read_head(self) -> bool:
        head, end, rest = self._raw.partition(b"\r\n\r\n")
        line, *fields = head.split(b"\r\n")
        if not b"HTTP/1.".startswith(line[:7]) or (end and len(line.split()) < 2):
            raise ValueError(f"got {line[:40]!r}, expected an answer of HTTP/1.1")
        if not end:
            _check_size(self._raw)
            return False
        self._status = int(line.split()[1])
        for field_ in fields:
            name, _, value = field_.lower().partition(b":")
            self._chunked |= name == b"transfer-encoding" and b"chunked" in value
        self._raw = rest
        return True

    def _read_body(self) -> None:
        if not self._chunked:
            self._body += self._raw
            self._raw = b""
            self._read_events()
            return
        while self._raw:
            if self._left:
                piece = self._raw[: self._left]
                self._body += piece[: max(0, self._left - 2)]  # not the line break behind the chunk
                self._raw = self._raw[len(piece) :]
                self._left -= len(piece)
                self._read_events()
            else:
                line, end, rest = self._raw.partition(b"\r\n")
                if not end:
                    _check_size(line)
                    return
                self._left = int(line.split(b";")[0], 16) + 2
                self._raw = rest

    def _read_events(self) -> None:
        _check_size(self._body)
        if self._status != 200:
            return
        *lines, last = self._body.split(b"\n")
        self._body = last
        for line in lines:
            if line.startswith(b"data:") and not self.ended.done():
                event = line[5:].strip()
                if event == b"[DONE]":
                    self.ended.set_result(None)
                else:
                    _note(event, self._seen)


def _check_size(text: bytes | bytearray) -> None:
    if len(text) > _LIMIT:
        raise ValueError(f"got {len(text)} bytes, expected lines of at most {_LIMIT}")


def _note(event: bytes | bytearray, seen: Stream) -> None:
    now = time.perf_counter()
    document = json.loads(event)
    if "error" in document:
        raise RefusedError(str(document["error"]))
    if document.get("choices"):
        seen.times.append(now)
    if document.get("usage"):
        seen.tokens = document["usage"]["completion_tokens"]
