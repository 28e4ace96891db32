"""Whether kernels are launched so that they may overlap the end of the kernel before them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_enabled = ContextVar("ostinato_pdl", default=True)


def enabled() -> bool:
    """Return whether launches ask for programmatic dependent launch: yes, unless within `pdl`."""
    return _enabled.get()


@contextmanager
def pdl(enable: bool) -> Iterator[None]:
    """Launch the kernels of this block with or without programmatic dependent launch.

    It holds for the calling thread (or asyncio task). A captured graph keeps what was set while
    it was captured.
    """
    token = _enabled.set(enable)
    try:
        yield
    finally:
        _enabled.reset(token)
