"""Messages between the process that serves HTTP and the one that has the engine."""

from __future__ import annotations

import pickle
import socket
import struct
import threading
from contextlib import suppress
from typing import Any

from ..engine import TokenEvent
from .errors import EngineError, EngineLostError
from .jobs import Ended, Message, Progress

_LENGTH = struct.Struct("<Q")
# What errors are on the other side; the first that fits.
_ERRORS = (EngineLostError, EngineError, TypeError, ValueError, OSError, RuntimeError)


class Channel:
    """Sends and receives tuples over a connected stream socket.

    They are pickled: the other end must be a process of our own, and nobody else's.

    Args:
        connection: of which the channel becomes the owner.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._stream = connection.makefile("rb")
        self._sending = threading.Lock()

    def send(self, *message: Any) -> None:
        """Send a message, from any thread; it is lost where the other end has gone.

        Where the other end does not read, this waits.
        """
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        with self._sending, suppress(OSError):
            self._socket.sendall(_LENGTH.pack(len(data)) + data)

    def receive(self) -> tuple[Any, ...] | None:
        """Return the next message; None where the other end has gone. For one thread."""
        try:
            head = self._stream.read(_LENGTH.size)
            if len(head) < _LENGTH.size:
                return None
            (length,) = _LENGTH.unpack(head)
            data = self._stream.read(length)
        except (OSError, ValueError):  # the other end was killed, or this one is closed
            return None
        if len(data) < length:
            return None
        message: tuple[Any, ...] = pickle.loads(data)
        return message

    def close(self) -> None:
        """Let both ends' `receive` return None."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def portable(error: BaseException) -> Exception:
    """Return an error with the same text that the other end can read."""
    kind = next((kind for kind in _ERRORS if isinstance(error, kind)), RuntimeError)
    return kind(str(error))


def packed(message: Message) -> Any:
    """Return what `unpacked` makes the same message of; of a plain token a small tuple."""
    if isinstance(message, Ended):
        return Ended(portable(message.error))
    if isinstance(message, Progress):
        event = message.event
        if event.finish_reason is None and event.logprobs is None and event.error is None:
            return message.choice, event.request_id, event.token_id, event.text
    return message


def unpacked(sent: Any) -> Message:
    """Return the message that was packed."""
    if isinstance(sent, tuple):
        choice, request, token, text = sent
        return Progress(choice, TokenEvent(request, token, text))
    message: Message = sent
    return message
