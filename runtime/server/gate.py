"""What every request passes before a route sees it: request id, key, limits, log."""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
import secrets
import time
from typing import Any

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .documents import json_bytes
from .errors import ApiError, error_body
from .metrics import Metrics
from .page.routes import PATHS
from .preparation import DEADLINE
from .settings import Settings

_LOG = logging.getLogger("ostinato.server")
_OPEN = frozenset({"/health", "/ready"}) | PATHS
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")


class Gate:
    """ASGI middleware; `scope["ostinato"]` is a dictionary that routes add fields of the log to.

    Args:
        app: what is behind it.
        settings: the limits and keys.
        metrics: are told each answer.
    """

    def __init__(self, app: ASGIApp, settings: Settings, metrics: Metrics) -> None:
        self._app = app
        self._settings = settings
        self._metrics = metrics
        self._keys = [key.encode() for key in settings.api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"")
        name = given.decode() if _REQUEST_ID.fullmatch(given) else secrets.token_hex(16)
        scope["ostinato"] = {"request_id": name}
        answer = _Answer(send, name.encode())
        started = time.monotonic()
        DEADLINE.set(asyncio.get_running_loop().time() + self._settings.request_timeout)
        method = scope["method"]
        if method == "HEAD":  # the answer to GET, of which uvicorn sends no body
            scope = {**scope, "method": "GET"}
        try:
            self._check(scope, headers)
            await self._app(scope, self._limited(receive, headers), answer.send)
        except HTTPException as error:  # ours: those of routes have been answered
            await answer.refuse(error)
        except Exception:
            _LOG.exception("an internal error", extra={"fields": scope["ostinato"]})
            if answer.started:
                raise  # uvicorn breaks the connection, which is all that can still be said
            await answer.refuse(ApiError(500, "an internal error", code="internal_error"))
        finally:
            self._record(scope, method, answer.status, time.monotonic() - started)

    def _check(self, scope: Scope, headers: dict[bytes, bytes]) -> None:
        """Refuse a request for what its head says.

        Raises:
            ApiError: 401, 413 or 431.
        """
        settings = self._settings
        head = len(scope["raw_path"]) + len(scope["query_string"])
        head += sum(len(key) + len(value) + 4 for key, value in scope["headers"])
        if head > settings.max_head_bytes:
            raise ApiError(
                431,
                f"the headers are too large: at most {settings.max_head_bytes} bytes",
                headers={"connection": "close"},
            )
        if self._keys and scope["path"] not in _OPEN:
            kind, _, key = headers.get(b"authorization", b"").partition(b" ")
            # All are compared, so that the time does not tell which one was close.
            matches = [hmac.compare_digest(key.strip(), known) for known in self._keys]
            if kind.lower() != b"bearer" or not any(matches):
                raise ApiError(
                    401,
                    "a valid API key is needed: Authorization: Bearer KEY",
                    code="invalid_api_key",
                    headers={"www-authenticate": "Bearer"},
                )
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length[:20]) > settings.max_body_bytes:
            raise self._too_large()

    def _limited(self, receive: Receive, headers: dict[bytes, bytes]) -> Receive:
        """Return `receive` with the limits of a body's size and time."""
        deadline = asyncio.get_running_loop().time() + self._settings.body_timeout
        size = 0
        more = b"content-length" in headers or b"transfer-encoding" in headers

        async def limited() -> Message:
            nonlocal size, more
            if not more:
                return await receive()
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                raise ApiError(
                    408, "the request's body did not come in time", headers={"connection": "close"}
                ) from None
            more = message.get("more_body", False)
            size += len(message.get("body", b""))
            if size > self._settings.max_body_bytes:
                raise self._too_large()
            return message

        return limited

    def _too_large(self) -> ApiError:
        most = self._settings.max_body_bytes
        return ApiError(
            413,
            f"the request's body is too large: at most {most} bytes",
            headers={"connection": "close"},
        )

    def _record(self, scope: Scope, method: str, status: int, seconds: float) -> None:
        route = scope.get("route")
        path = getattr(route, "path", "unknown")
        self._metrics.answers.labels(path, str(status)).inc()
        _LOG.info(
            "request",
            extra={
                "fields": {
                    "method": method,
                    "route": path,
                    "status": status,
                    "seconds": round(seconds, 6),
                    **scope["ostinato"],
                }
            },
        )


class _Answer:
    """Sends an answer with the request's id, and remembers its status: 499 where none was sent."""

    def __init__(self, send: Send, request_id: bytes) -> None:
        self._send = send
        self._request_id = request_id
        self.status = 499
        self.started = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.started = True
            self.status = message["status"]
            extra = [(b"x-request-id", self._request_id), (b"x-content-type-options", b"nosniff")]
            message = {**message, "headers": [*message["headers"], *extra]}
        await self._send(message)

    async def refuse(self, error: HTTPException) -> None:
        code = getattr(error, "code", None)
        body = json_bytes(error_body(error.status_code, error.detail, None, code))
        headers: list[Any] = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
        ]
        headers += [(k.encode(), v.encode()) for k, v in (error.headers or {}).items()]
        start = {"type": "http.response.start", "status": error.status_code, "headers": headers}
        await self.send(start)
        await self.send({"type": "http.response.body", "body": body})
