"""Routes of OpenAI's and Anthropic's APIs that are not served, so that the answer names them."""

from __future__ import annotations

from fastapi import APIRouter

from ..errors import ApiError

ROUTER = APIRouter(include_in_schema=False)
_SERVED = "/v1/completions and /v1/chat/completions"


def _refuse(path: str) -> None:
    async def refuse() -> None:
        raise ApiError(404, f"{path} is not served: use {_SERVED}", code="not_implemented")

    ROUTER.add_api_route(path, refuse, methods=["GET", "POST", "DELETE"])


for _path in (
    "/v1/responses",
    "/v1/messages",
    "/v1/embeddings",
    "/v1/rerank",
    "/v1/moderations",
    "/v1/audio/transcriptions",
    "/v1/images/generations",
    "/v1/files",
    "/v1/batches",
):
    _refuse(_path)
