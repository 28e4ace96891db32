"""The application: routes, the gate before them, and errors in OpenAI's shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from .. import __version__
from .api import chat, completions, refused, state, tokens
from .documents import JsonAnswer
from .errors import ApiError, error_body
from .gate import Gate
from .page import routes as page
from .service import Service

_MOST_FAULTS = 8  # that one answer names


def create_app(service: Service) -> FastAPI:
    """Return the ASGI application that serves a model.

    It has no state of its own: what it knows is in `service`.
    """
    # No page of documentation: it would load scripts from elsewhere.
    app = FastAPI(title="Ostinato", version=__version__, docs_url=None, redoc_url=None)
    app.state.service = service
    for part in (state, completions, chat, tokens, refused, page):
        app.include_router(part.ROUTER)
    app.add_middleware(Gate, settings=service.settings, metrics=service.metrics)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    return app


async def _http_error(request: Request, error: Exception) -> JsonAnswer:
    assert isinstance(error, HTTPException)
    if isinstance(error, ApiError):
        body = error.body()
    else:
        # Of the router: no such path, or not with this method.
        body = error_body(error.status_code, f"{request.url.path[:200]}: {error.detail}")
    return JsonAnswer(body, error.status_code, dict(error.headers or {}))


async def _validation_error(request: Request, error: Exception) -> JsonAnswer:
    assert isinstance(error, RequestValidationError)
    faults = error.errors()
    text = "; ".join(map(_fault, faults[:_MOST_FAULTS]))
    param = _where(faults[0]["loc"]) or None
    unknown = all(fault["type"] == "extra_forbidden" for fault in faults)
    code = "unknown_field" if unknown else "invalid_value"
    return JsonAnswer(error_body(400, text, param, code), 400)


def _fault(fault: dict[str, Any]) -> str:
    where = _where(fault["loc"])
    if fault["type"] == "extra_forbidden":
        return f"{where}: got an unknown field, expected one that this server serves"
    if fault["type"] == "json_invalid":
        return f"body: got malformed JSON: {fault['ctx']['error']}"
    if fault["type"] == "model_attributes_type" and not where:
        return "body: expected a JSON object, sent with content-type: application/json"
    message = fault["msg"].removeprefix("Value error, ")
    if fault["type"] == "value_error" and not where:
        return str(message)
    return f"{where or 'body'}: {message[:1].lower()}{message[1:]}"


def _where(loc: Sequence[int | str]) -> str:
    # Of a field that may be of several types, pydantic names the type, too.
    types = ("body", "str")
    path = [str(part) for part in loc if part not in types and "[" not in str(part)]
    # Of malformed JSON it is a place in the text.
    return "" if path and path[0].isdigit() else ".".join(path)[:200]
