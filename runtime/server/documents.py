"""JSON documents as bytes."""

from __future__ import annotations

import json
from typing import Any

from fastapi.responses import JSONResponse


def json_bytes(document: Any) -> bytes:
    """Return a document in UTF-8.

    Texts of clients and models may have lone surrogates, which UTF-8 has not: they are written as
    JSON's escapes.
    """
    text = json.dumps(document, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode(errors="backslashreplace")


class JsonAnswer(JSONResponse):
    """An answer that is such a document."""

    def render(self, content: Any) -> bytes:
        """Return the answer's body."""
        return json_bytes(content)
