"""A connection whose requests must begin with a head of bounded size, in bounded time.

An offer to speak another protocol, as Java's client makes one (h2c), is passed over.
"""

from __future__ import annotations

import asyncio
import functools
import json
import sys
from http import HTTPStatus
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from .errors import error_body
from .settings import Settings


class LimitedConnection(HttpToolsProtocol):
    """uvicorn's protocol with limits that it lacks, of a head that does not end, and with bodies.

    uvicorn drops the body of a request that offers an upgrade.

    Args:
        max_head_bytes: bytes that may come before a head is complete.
        head_timeout: seconds from its first byte, or from the connection's beginning, to its end.
        max_connections: open at once.
        options: of uvicorn's protocol.
    """

    def __init__(
        self, *, max_head_bytes: int, head_timeout: float, max_connections: int, **options: Any
    ) -> None:
        super().__init__(**options)
        self._max_connections = max_connections
        self._max_head_bytes = max_head_bytes
        self._head_timeout = head_timeout
        self._head_bytes = 0  # of the head that has begun, in earlier pieces
        self._piece_bytes = 0  # of the piece that is parsed, where all of it may be of one head
        self._head_timer: asyncio.TimerHandle | None = None
        self._piece = b""  # that is parsed
        self._repeats_head = False  # while a parser is told again what is known of a head

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start to wait for the first head."""
        super().connection_made(transport)
        if len(self.connections) > self._max_connections:
            self._refuse(
                HTTPStatus.SERVICE_UNAVAILABLE,
                "too many connections: try again later",
                "retry-after: 1\r\n",
            )
        else:
            self._begin_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop waiting."""
        self._end_head()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        """Start to wait for the end of a head whose first byte has come."""
        if self._repeats_head:
            return
        self._begin_head()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Stop waiting."""
        if self._repeats_head:
            return
        self._end_head()
        super().on_headers_complete()

    def on_url(self, url: bytes) -> None:
        """Note a piece of the request's target."""
        if not self._repeats_head:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Note a header."""
        if not self._repeats_head:
            super().on_header(name, value)

    def on_message_complete(self) -> None:
        """Note that what follows in this piece, if anything, is another head."""
        self._head_bytes = self._piece_bytes = 0
        super().on_message_complete()

    def data_received(self, data: bytes) -> None:
        """Parse data, and refuse a head that grows beyond the limit."""
        if self.transport.is_closing():
            return
        self._piece, self._piece_bytes = data, len(data)
        super().data_received(data)
        self._piece = b""
        if self._head_timer is None:
            return
        self._head_bytes += self._piece_bytes
        if self._head_bytes > self._max_head_bytes:
            self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "the headers are too large")

    def _unsupported_upgrade_warning(self) -> None:
        """Go on as if no upgrade had been offered (RFC 9110, 7.8); in the handler of its error.

        The parser has ended behind the head. Another one reads the body, and what follows.
        """
        error = sys.exc_info()[1]
        assert isinstance(error, httptools.HttpParserUpgrade)
        rest = self._piece[error.args[0] :]
        framing = (b"content-length", b"transfer-encoding")
        head = [b"POST / HTTP/1.1"]
        head += [name + b": " + value for name, value in self.headers if name in framing]
        self.cycle.more_body = True
        self.parser = httptools.HttpRequestParser(self)
        self._repeats_head = True
        try:
            self.parser.feed_data(b"\r\n".join([*head, b"", b""]))
        finally:
            self._repeats_head = False
        if rest:
            super().data_received(rest)

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP."""
        self._refuse(HTTPStatus.BAD_REQUEST, msg)

    def _begin_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
        self._head_timer = self.loop.call_later(
            self._head_timeout,
            self._refuse,
            HTTPStatus.REQUEST_TIMEOUT,
            "the headers did not come in time",
        )

    def _end_head(self) -> None:
        self._head_bytes = self._piece_bytes = 0
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _refuse(self, status: HTTPStatus, message: str, headers: str = "") -> None:
        self._end_head()
        if self.cycle is not None and not self.cycle.response_complete:
            self.transport.close()  # an answer is on its way, and no other fits in between
        if self.transport.is_closing():
            return
        body = json.dumps(error_body(status, message)).encode()
        head = (
            f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\n{headers}connection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()


def limited_connection(settings: Settings) -> Any:
    """Return what uvicorn makes its connections with."""
    return functools.partial(
        LimitedConnection,
        max_head_bytes=settings.max_head_bytes,
        head_timeout=settings.head_timeout,
        max_connections=settings.max_connections,
    )
