"""A server that most tests share, and an engine like its own to compare with."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ostinato.engine import Engine
from serving import Client, make_engine, make_service, serving


@pytest.fixture(scope="session")
def client() -> Iterator[Client]:
    """Serve a random tiny model."""
    with serving(make_service()) as it:
        yield it


@pytest.fixture(scope="session")
def engine() -> Iterator[Engine]:
    """Return an engine of the same model."""
    it = make_engine()
    yield it
    it.close()
