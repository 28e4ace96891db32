"""A process that serves HTTP for an engine of this one.

What it does for a token costs more of Python's time than the engine's own step. In one process both
would wait for one interpreter's lock.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from types import FrameType

from ..checkpoint import load_tokenizer
from ..line_process import import_path
from .channel import Channel, portable
from .engine_client import EngineClient
from .engine_host import EngineHost
from .engine_thread import EngineThread
from .loading import EngineLimits, ServedModel
from .log import log_to
from .process import serve, spared_collector
from .settings import Settings

_LOG = logging.getLogger("ostinato.server")
_LAST_S = 5.0  # for a process that has been left, before it is killed


class HttpProcess:
    """Starts the process, which reads what it needs and waits for an engine.

    A context manager that ends it.

    Args:
        bound: a socket of `bind`, which is the process' own from here on: it listens on it once
            there is an engine, and when it ends clients are refused.
        model: what is served.
        settings: of the server.

    Raises:
        ValueError, OSError: when the checkpoint or an option is no good.
        RuntimeError: when the process ends.
    """

    def __init__(self, bound: socket.socket, model: ServedModel, settings: Settings) -> None:
        ours, its = socket.socketpair()
        with its, bound:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__, str(its.fileno()), str(bound.fileno())],
                env={**os.environ, "PYTHONPATH": import_path()},
                pass_fds=(its.fileno(), bound.fileno()),
                start_new_session=True,  # signals come from here, each once
            )
        self._channel = Channel(ours)
        try:
            self._channel.send(model, settings)
            self._read()
        except BaseException:
            self._process.kill()
            self.close()
            raise

    def _read(self) -> None:
        answer = self._channel.receive()
        if answer is None:
            code = self._process.wait()
            raise RuntimeError(f"the process for HTTP has ended with exit code {code}")
        (error,) = answer
        if error is not None:
            raise error

    def serve(self, engine: EngineThread, limits: EngineLimits) -> bool:
        """Serve until SIGINT or SIGTERM; then let running requests end, and the engine.

        Returns:
            Whether it was ended by a signal, and not by an error of the engine or of the process.
        """
        host = EngineHost(engine, self._channel)
        hosting = threading.Thread(target=host.run, name="http", daemon=True)
        with spared_collector(), self._forwarded_signals() as signals:
            self._channel.send(limits)
            hosting.start()
            code = self._process.wait()
            self._channel.close()
            hosting.join()
        alive = engine.alive
        engine.stop()
        if code and alive and not signals:
            _LOG.error("the process for HTTP has ended with exit code %d", code)
        return alive and (code == 0 or bool(signals))

    @contextlib.contextmanager
    def _forwarded_signals(self) -> Iterator[list[int]]:
        """Send the process the signals that ask this one to end; yields those that came."""
        came: list[int] = []

        def forward(number: int, frame: FrameType | None) -> None:
            came.append(number)
            self._process.send_signal(number)

        before = {
            number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)
        }
        try:
            yield came
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def close(self) -> None:
        """End the process."""
        self._channel.close()
        try:
            self._process.wait(_LAST_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> HttpProcess:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def main(channel: Channel, bound: socket.socket) -> int:
    """Be the process: serve HTTP on a socket for the engine at the other end of a channel."""
    asked = channel.receive()
    if asked is None:
        return 0
    model: ServedModel
    settings: Settings
    model, settings = asked
    try:
        service = model.service(load_tokenizer(model.folder), settings)
    except (ValueError, OSError) as error:
        channel.send(portable(error))
        return 0
    channel.send(None)
    made = channel.receive()
    if made is None:  # there is no engine
        return 0
    (limits,) = made
    log_to(sys.stderr)
    return 0 if serve(service(EngineClient(channel), limits), bound) else 1


if __name__ == "__main__":
    sys.exit(
        main(
            Channel(socket.socket(fileno=int(sys.argv[1]))), socket.socket(fileno=int(sys.argv[2]))
        )
    )
