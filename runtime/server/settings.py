"""The limits of a server."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Settings:
    """How much a server takes from its clients. Times are in seconds.

    Args:
        host: address to listen on.
        port: 0 for a free one.
        api_keys: a request needs one of them, but for /health and /ready; none: no key is needed.
        max_queue: requests that may wait beside those that the engine runs; each of the `n`
            choices of a prompt counts as one.
        request_timeout: from a request's arrival to the end of its answer.
        body_timeout: for a request's body to arrive.
        head_timeout: for a request's line and headers to arrive.
        drain_timeout: for running requests to end after SIGTERM.
        max_body_bytes: of a request's body.
        max_head_bytes: of a request's line and headers.
        max_connections: open at once; more are answered with 503.
        max_choices: `n` times the number of prompts of one request.
        template_timeout: for a chat template to render.

    Raises:
        ValueError: when a value is out of range, naming it.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    max_queue: int = 1024
    request_timeout: float = 600.0
    body_timeout: float = 30.0
    head_timeout: float = 10.0
    drain_timeout: float = 30.0
    max_body_bytes: int = 8 << 20
    max_head_bytes: int = 32 << 10
    max_connections: int = 4096
    max_choices: int = 128
    template_timeout: float = 5.0

    def __post_init__(self) -> None:
        least = {"port": 0, "max_queue": 0}
        for item in fields(self):
            value = getattr(self, item.name)
            if not isinstance(value, int | float):
                continue
            lowest = least.get(item.name, 1)
            if isinstance(value, float):
                if not 0 < value < math.inf:
                    raise ValueError(f"{item.name}: got {value}, expected seconds above 0")
            elif value < lowest:
                raise ValueError(f"{item.name}: got {value}, expected at least {lowest}")
        if self.port > 65535:
            raise ValueError(f"port: got {self.port}, expected 0 to 65535")
        for key in self.api_keys:
            if not key or not key.isascii() or not key.isprintable() or " " in key:
                raise ValueError("api_key: expected printable ASCII characters without spaces")
