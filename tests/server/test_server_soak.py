"""Mixed load on a server process, with restarts: bits, memory, pages, and an answer for everybody.

`make test` sends some hundred requests to one server; `make test-long` sends 10,000, and ends
servers under load.
"""

from __future__ import annotations

import itertools
import random
import signal
import time
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from mixed_load import CLIENTS, Load, assert_idle, expected_texts, held, random_bodies, served

from effort import effort
from server_process import free_port

REQUESTS = effort(100, 10_000)
DISTINCT = effort(30, 1000)
ENDINGS = effort([], [signal.SIGTERM, signal.SIGKILL, signal.SIGTERM])  # of servers under load
IN_EACH = REQUESTS // 20  # requests to a server that is ended so
MOST_GROWTH = 16 << 20  # bytes, from a fifth of the requests to the last server to their end


@pytest.mark.timeout(900)
def test_mixed_load_and_restarts_lose_nothing() -> None:
    pytest.importorskip("xgrammar")
    draw = random.Random(7)
    bodies = list(random_bodies(draw, DISTINCT))
    port = free_port()
    load = Load(port, bodies, expected_texts(bodies))
    numbers = itertools.count()
    waiting: list[Future[None]] = []

    def send(count: int) -> None:
        for future in [pool.submit(load.send, next(numbers)) for _ in range(count)]:
            future.result()

    with ThreadPoolExecutor(CLIENTS) as pool:
        for ending in ENDINGS:
            with served(port, load) as process:
                send(IN_EACH // 2)
                under_load = [pool.submit(load.send, next(numbers)) for _ in range(IN_EACH // 2)]
                waiting += under_load
                while sum(future.done() for future in under_load) < IN_EACH // 4:
                    time.sleep(0.005)
                load.end(killed=ending == signal.SIGKILL)
                process.send_signal(ending)
                assert process.wait(60) == (0 if ending == signal.SIGTERM else -ending)
        with served(port, load) as process:
            for future in waiting:
                future.result()
            left = REQUESTS - next(numbers)
            send(left // 5)
            assert_idle(port)
            memory, files = held(process)
            send(left - left // 5)
            assert_idle(port)
            memory_after, files_after = held(process)
            load.end(killed=False)
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
    assert load.broken == 0, "a server that drains has broken off an answer"
    assert memory_after - memory <= MOST_GROWTH
    assert files_after <= files + CLIENTS  # whose last connections may not have ended yet
