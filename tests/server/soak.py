"""Serves mixed load for a given time, and writes what the server holds as it goes by.

    OMP_NUM_THREADS=1 python tests/server/soak.py SECONDS FILE

Every answer is checked: texts must be those of an engine in this process, bit for bit. Once a
minute the load pauses until the server holds no request; it must have all its pages then. What it
holds in memory and files goes into FILE, and must stay as it was after a fifth of the time.
"""

from __future__ import annotations

import argparse
import itertools
import random
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from mixed_load import (  # noqa: E402  # behind their folders
    CLIENTS,
    Load,
    assert_idle,
    expected_texts,
    held,
    metrics,
    random_bodies,
    served,
)

from ostinato.bench.report import Report  # noqa: E402
from server_process import free_port  # noqa: E402

DISTINCT = 1000
MOST_GROWTH_MIB = 16
COUNTED = {
    "prompt_tokens": "ostinato_prompt_tokens_total",
    "completion_tokens": "ostinato_completion_tokens_total",
    "shared_tokens": "ostinato_engine_shared_tokens_total",
    "preemptions": "ostinato_engine_preemptions_total",
    "evicted_pages": "ostinato_engine_evicted_pages_total",
}


def soak(seconds: float, pause_s: float) -> list[dict[str, Any]]:
    """Return a row a minute; raise AssertionError where an answer or the server is wrong.

    Args:
        seconds: of load.
        pause_s: that each client waits between two requests.
    """
    bodies = list(random_bodies(random.Random(7), DISTINCT))
    port = free_port()
    load = Load(port, bodies, expected_texts(bodies))
    numbers = itertools.count()
    rows: list[dict[str, Any]] = []
    sent = 0

    def client(until: float) -> int:
        count = 0
        while time.monotonic() < until:
            load.send(next(numbers))
            count += 1
            time.sleep(pause_s)
        return count

    with ThreadPoolExecutor(CLIENTS) as pool, served(port, load) as process:
        started = time.monotonic()
        while (passed := time.monotonic() - started) < seconds:
            until = time.monotonic() + min(60, seconds - passed)
            sent += sum([f.result() for f in [pool.submit(client, until) for _ in range(CLIENTS)]])
            assert_idle(port)
            memory, files = held(process)
            found = metrics(port)
            rows.append(
                {
                    "section": "soak",
                    "case": f"minute {len(rows) + 1}",
                    "impl": "ostinato_serve",
                    "requests": sent,
                    "memory_mib": round(memory / (1 << 20), 1),
                    "files": files,
                    **{name: int(found[metric]) for name, metric in COUNTED.items()},
                }
            )
            print(rows[-1], flush=True)
        load.end(killed=False)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    assert load.broken == 0
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description="Serve mixed load for a given time.")
    parser.add_argument("seconds", type=float)
    parser.add_argument("file", type=Path)
    parser.add_argument("--pause-s", type=float, default=0.0, help="of each client, per request")
    arguments = parser.parse_args()
    report = Report.for_device(torch.device("cpu"))  # first: the checkout may change meanwhile
    rows = soak(arguments.seconds, arguments.pause_s)
    report.rows += rows
    report.write(arguments.file)
    early, last = rows[len(rows) // 5], rows[-1]
    assert last["memory_mib"] - early["memory_mib"] <= MOST_GROWTH_MIB, (early, last)
    assert last["files"] <= early["files"] + CLIENTS


if __name__ == "__main__":
    main()
