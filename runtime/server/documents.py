"""JSON documents as bytes."""

from __future__ import annotations

import json
from typing import Any

from fastapi.responses import JSONResponse

# One for all: `json.dumps` would make one for each document.
_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def json_bytes(document: Any) -> bytes:
    """Return a document in UTF-8.

    Texts of clients and models may have lone surrogates, which UTF-8 has not: they are written as
    JSON's escapes.
    """
    return _ENCODER.encode(document).encode(errors="backslashreplace")


class JsonAnswer(JSONResponse):
    """An answer that is such a document."""

    def render(self, content: Any) -> bytes:
        """Return the answer's body."""
        return json_bytes(content)
