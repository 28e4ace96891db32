"""The server's log: one JSON object per line, without prompts and texts."""

from __future__ import annotations

import json
import logging
import time
from typing import TextIO


class JsonFormatter(logging.Formatter):
    """Writes a record as JSON: time, level, message, and its `fields`, if it has some."""

    def format(self, record: logging.LogRecord) -> str:
        """Return one line."""
        entry = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry)


def log_to(stream: TextIO, level: int = logging.INFO) -> None:
    """Let the server and uvicorn log to a stream."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter())
    for name in ("ostinato.server", "uvicorn.error"):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.setLevel(level)
        logger.propagate = False
