"""A server process for clients that are installed in an environment of their own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from server_process import free_port, serve_process


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Serve examples/tiny-llama as `tiny`, with 4 texts at once."""
    port = free_port()
    with serve_process(port, "--served-model-name", "tiny", "--max-num-seqs", "4"):
        yield f"http://127.0.0.1:{port}"


@pytest.fixture(scope="session")
def programs() -> Path:
    """Return the folder of the clients' programs, which `make test-clients` installs."""
    return Path(os.environ["OSTINATO_CLIENTS"]).resolve()
