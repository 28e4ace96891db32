"""The page's files, with headers that let a browser load nothing else."""

from __future__ import annotations

from importlib import resources

from fastapi import APIRouter, Response

ROUTER = APIRouter(include_in_schema=False)
_TYPES = {
    "css": "text/css; charset=utf-8",
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
_POLICY = "; ".join(
    (
        "default-src 'none'",
        *("script-src 'self'", "style-src 'self'", "img-src 'self'", "connect-src 'self'"),
        *("base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'"),
        # Texts of models become nodes of text; a script that writes HTML is an error.
        *("require-trusted-types-for 'script'", "trusted-types 'none'"),
    )
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


def _add(path: str, name: str, content: bytes) -> None:
    kind = _TYPES[name.rpartition(".")[2]]

    async def file() -> Response:
        return Response(content, headers=_HEADERS, media_type=kind)

    ROUTER.add_api_route(path, file, methods=["GET"])


def _files() -> dict[str, bytes]:
    """Return the content of each file of the page by its name."""
    folder = resources.files(__package__)
    return {
        file.name: file.read_bytes()
        for file in folder.iterdir()
        if file.name.rpartition(".")[2] in _TYPES
    }


_INDEX = "index.html"
# The paths of the page, which have nothing secret: its script asks for the API key.
PATHS = frozenset({"/"} | {f"/page/{name}" for name in _files() if name != _INDEX})

for _name, _content in _files().items():
    _add("/" if _name == _INDEX else f"/page/{_name}", _name, _content)
