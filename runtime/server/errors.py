"""Errors in OpenAI's shape."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from starlette.exceptions import HTTPException

_TYPES = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
}


class ApiError(HTTPException):
    """What a client is told of a request that fails.

    Args:
        status: of the HTTP answer.
        message: one sentence, without paths of this machine.
        param: the field of the request that is at fault.
        code: a short name of the fault for programs.
        headers: of the answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, dict(headers or {}))
        self.param = param
        self.code = code

    def body(self) -> dict[str, Any]:
        """Return the answer's JSON document."""
        return error_body(self.status_code, self.detail, self.param, self.code)


class EngineError(Exception):
    """The engine could not serve a request; its clients are told without details."""


class EngineLostError(EngineError):
    """A process that serves the model was lost, and with it the engine."""


def error_body(
    status: int, message: str, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """Return the JSON document of an error."""
    server = "server_error" if status >= 500 else "invalid_request_error"
    kind = _TYPES.get(HTTPStatus(status), server)
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def bad_value(error: Exception) -> ApiError:
    """Return the answer to a value that the engine refuses: its text begins with the argument."""
    message = str(error)
    name, colon, _ = message.partition(":")
    param = name if colon and name.isidentifier() else None
    too_long = "max_context" in message or "pages" in message
    return ApiError(400, message, param=param, code="context_length_exceeded" if too_long else None)


def bad_form(field: str, problem: object) -> ApiError:
    """Return the answer to a form of texts, in this field, that the engine cannot follow."""
    return ApiError(400, f"{field}: {problem}", param=field)


def engine_ended(error: EngineError, *, draining: bool) -> ApiError:
    """Return the answer to a request that an error of the engine has ended.

    Args:
        error: of the engine.
        draining: whether the server stops.
    """
    if isinstance(error, EngineLostError):
        return engine_lost()
    return stopping() if draining else engine_failed()


def engine_failed() -> ApiError:
    """Return the answer to a request that the engine failed to serve."""
    return ApiError(500, "the engine failed while it served this request", code="engine_error")


def engine_lost() -> ApiError:
    """Return the answer to a request while the server ends, since a process of it was lost."""
    return ApiError(
        503,
        "the server has lost a process that it needs, and is stopping",
        code="engine_lost",
        headers={"retry-after": "5"},
    )


def late() -> ApiError:
    """Return the answer to a request whose time is over."""
    return ApiError(504, "the request took longer than this server allows", code="timeout")


def stopping() -> ApiError:
    """Return the answer while the server drains."""
    return ApiError(
        503, "the server is stopping", code="server_stopping", headers={"retry-after": "5"}
    )
