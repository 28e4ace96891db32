"""`ostinato serve` of examples/tiny-llama as a process of its own."""

from __future__ import annotations

import http.client
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

TINY_LLAMA = Path(__file__).parents[2] / "examples" / "tiny-llama"
KEY = "key"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@contextmanager
def serve_process(port: int, *flags: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run the server, with `KEY`, until the block ends; its log is the process' stderr."""
    command = [sys.executable, "-m", "ostinato", "serve", str(TINY_LLAMA), "--port", str(port)]
    process = subprocess.Popen(
        [*command, "--device", "cpu", "--no-verify", *flags],
        stderr=subprocess.PIPE,
        env={**os.environ, "OSTINATO_API_KEY": KEY},
    )
    try:
        deadline = time.monotonic() + 120
        while not is_ready(port):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.1)
        yield process
    finally:
        process.kill()
        process.communicate()


def is_ready(port: int) -> bool:
    try:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        connection.request("GET", "/ready")
        return connection.getresponse().status == 200
    except OSError:
        return False


def http_process(server: int) -> int:
    """Return the id of the process in which a server's process serves HTTP."""
    paths = Path(f"/proc/{server}/task").glob("*/children")
    children = [int(pid) for path in paths for pid in path.read_text().split()]
    (found,) = [
        pid for pid in children if b"http_process" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    return found
