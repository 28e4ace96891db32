"""An OpenAI-compatible HTTP server in front of an `Engine`. It needs the extra `serve`."""

from __future__ import annotations

from .app import create_app
from .engine_thread import EngineThread
from .log import log_to
from .process import bind, serve
from .service import Service
from .settings import Settings

__all__ = ["EngineThread", "Service", "Settings", "bind", "create_app", "log_to", "serve"]
