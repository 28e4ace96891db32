"""What a request needs before a text is generated: its prompt's tokens, a grammar.

Some of it takes seconds where a client wants that, so each kind has threads of its own, and waits
for no other kind.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any, Literal, TypeVar

from .errors import late, stopping

T = TypeVar("T")
Kind = Literal["short text", "long text", "template"]

# Of the request that is served, by the loop's clock; set where it arrives.
DEADLINE: ContextVar[float] = ContextVar("deadline")

# Texts of so many characters take milliseconds; one of 8 MB takes seconds.
_SHORT = 64 << 10
_THREADS: dict[Kind, int] = {"short text": 2, "long text": 1, "template": 1}


def kind_of(text: str | Sequence[int]) -> Kind:
    """Return which threads encode a text, or decode token ids."""
    return "short text" if len(text) <= _SHORT else "long text"


class Preparation:
    """Does work of requests in threads, until their deadlines.

    Args:
        timeout: seconds for work of what has no deadline.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._threads = {
            kind: ThreadPoolExecutor(count, thread_name_prefix=kind)
            for kind, count in _THREADS.items()
        }
        self._waited_for: set[asyncio.Future[Any]] = set()

    def deadline(self) -> float:
        """Return when the request that is served has to end, by the loop's clock."""
        return DEADLINE.get(asyncio.get_running_loop().time() + self._timeout)

    async def run(self, kind: Kind, function: Callable[[], T]) -> T:
        """Return what a function returns, which is called in a thread of its kind.

        Raises:
            ApiError: as `wait`.
        """
        return await self.wait(
            asyncio.get_running_loop().run_in_executor(self._threads[kind], function)
        )

    async def wait(self, future: asyncio.Future[T]) -> T:
        """Return the result of a future.

        Raises:
            ApiError: 504 when the request's time is over, 503 when the server stops.
        """
        self._waited_for.add(future)
        try:
            async with asyncio.timeout_at(self.deadline()):
                return await future
        except TimeoutError:
            raise late() from None
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise stopping() from None
        finally:
            self._waited_for.discard(future)

    def end(self) -> None:
        """End the requests that wait for something."""
        for future in list(self._waited_for):
            future.cancel()

    def close(self) -> None:
        """Begin nothing more; what runs goes on to its end."""
        for threads in self._threads.values():
            threads.shutdown(wait=False, cancel_futures=True)
