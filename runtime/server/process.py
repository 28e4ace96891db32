"""Runs a server until a signal ends it, and drains it then."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import socket
from collections.abc import Callable, Iterator

import uvicorn

from .app import create_app
from .connection import limited_connection
from .service import Service

_LOG = logging.getLogger("ostinato.server")
_BACKLOG = 2048  # connections that wait to be accepted
_KEEP_ALIVE = 75  # seconds; longer than those of clients, which then never write to a closed one
_LAST_WORDS = 2.0  # seconds for the answers of requests that the drain has ended


class _Server(uvicorn.Server):
    """uvicorn's server, which refuses new requests and waits for running ones when it ends."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service
        self.engine_died = False

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        loop = asyncio.get_running_loop()

        def end() -> None:
            self.engine_died = True
            self.should_exit = True

        def on_death() -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended before
                loop.call_soon_threadsafe(end)

        self._service.engine.on_death = on_death
        if not self._service.engine.alive:  # since before anybody was told
            end()
        await super().serve(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Let signals end the server, but not the process before the engine has been released."""
        with super().capture_signals():
            yield
            self._captured_signals.clear()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        service = self._service
        service.admission.draining = True
        timer = asyncio.get_running_loop().call_later(
            service.settings.drain_timeout, service.end_all
        )
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()


def bind(host: str, port: int) -> socket.socket:
    """Return a socket at an address, so that one in use is found before a model is loaded.

    It does not listen: until `serve` clients are refused. Of several that are bound to one address
    meanwhile the first to listen has it.

    Raises:
        OSError: when the address cannot be had.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except BaseException:
        bound.close()
        raise
    return bound


@contextlib.contextmanager
def spared_collector() -> Iterator[None]:
    """Let the garbage collector pass over what there is, which would hold up all texts at times."""
    if gc.get_freeze_count():  # somebody else's doing, to be undone by them
        yield
        return
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def serve(
    service: Service,
    bound: socket.socket,
    *,
    on_ready: Callable[[uvicorn.Server], None] = lambda server: None,
) -> bool:
    """Serve until SIGINT or SIGTERM; then let running requests end, within `drain_timeout`.

    Args:
        service: what is served; it is closed at the end.
        bound: a socket of `bind`.
        on_ready: called before requests are taken, with a server whose `should_exit` ends it.

    Returns:
        Whether it was ended by a signal, and not by an error of the engine, or of the socket.
    """
    settings = service.settings
    try:
        bound.listen(_BACKLOG)
    except OSError as error:
        _LOG.error("port %d: cannot be listened on: %s", bound.getsockname()[1], error.strerror)
        service.close()
        return False
    config = uvicorn.Config(
        create_app(service),
        http=limited_connection(settings),
        # Not uvloop, where it is installed: it keeps the interpreter's lock while it sends, which
        # an engine in this process would wait for, and is no faster where there is none.
        loop="asyncio",
        ws="none",
        interface="asgi3",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE,
        timeout_graceful_shutdown=int(settings.drain_timeout + _LAST_WORDS + 1),
    )
    server = _Server(config, service)
    on_ready(server)
    try:
        with spared_collector():
            server.run(sockets=[bound])
    finally:
        service.close()
    return not server.engine_died
