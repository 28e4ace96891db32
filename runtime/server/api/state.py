"""Routes that say what is served and how it is."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST

from ... import __version__
from ..errors import EngineError
from .dependencies import Served

ROUTER = APIRouter()
_PATIENCE = 2.0  # seconds that /metrics waits for the end of the engine's step


@ROUTER.get("/health")
async def health(service: Served) -> JSONResponse:
    """Say whether the engine lives: 200, or 503."""
    alive = service.engine.alive
    return JSONResponse({"status": "ok" if alive else "failed"}, 200 if alive else 503)


@ROUTER.get("/ready")
async def ready(service: Served) -> JSONResponse:
    """Say whether new requests are taken: 200 after capture until the server drains, or 503."""
    taken = service.engine.alive and not service.admission.draining
    return JSONResponse({"status": "ready" if taken else "stopping"}, 200 if taken else 503)


@ROUTER.get("/version")
async def version() -> dict[str, str]:
    """Return the version of Ostinato."""
    return {"version": __version__}


@ROUTER.get("/metrics")
async def metrics(service: Served) -> Response:
    """Return all metrics as Prometheus' text; in a long step, the engine's are those of before."""
    numbers = None
    with contextlib.suppress(TimeoutError, EngineError):
        future = asyncio.wrap_future(service.engine.numbers())
        numbers = await asyncio.wait_for(future, _PATIENCE)
    text = service.metrics.render(service.admission.taken, numbers)
    return Response(text, media_type=CONTENT_TYPE_LATEST)


@ROUTER.get("/v1/models")
async def models(service: Served) -> dict[str, Any]:
    """List the names of the model."""
    return {"object": "list", "data": [_model(name, service) for name in service.models]}


@ROUTER.get("/v1/models/{name:path}")
async def model(name: str, service: Served) -> dict[str, Any]:
    """Describe the model by one of its names."""
    service.check_model(name)
    return _model(name, service)


def _model(name: str, service: Served) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "ostinato",
        "max_model_len": service.max_context,
        "chat": service.template is not None,
    }
