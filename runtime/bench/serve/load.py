"""Which requests are sent, and when."""

from __future__ import annotations

import asyncio
import json
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .client import Server, Stream


@dataclass(frozen=True)
class Lengths:
    """Tokens of a prompt and of its text."""

    prompt: int
    output: int


@dataclass(frozen=True)
class Load:
    """Requests to send.

    Args:
        model: that they name.
        lengths: of each request.
        rate: requests per second at random moments (Poisson); None: as many as `concurrency`.
        concurrency: requests in work at once, at most.
        vocab: prompts are random ids from `first_id` to this, exclusive.
        first_id: ids below it are often special tokens.
        ignore_eos: whether texts have their full length.
        seed: of prompts and moments.

    Raises:
        ValueError: when a value is out of range, naming it.
    """

    model: str
    lengths: Sequence[Lengths]
    rate: float | None = None
    concurrency: int | None = None
    vocab: int = 32000
    first_id: int = 100
    ignore_eos: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.lengths:
            raise ValueError("lengths: got none, expected at least one request")
        if self.rate is None and self.concurrency is None:
            raise ValueError("rate, concurrency: got neither, expected one or both")
        if self.rate is not None and not 0 < self.rate < math.inf:
            raise ValueError(f"rate: got {self.rate}, expected requests per second above 0")
        if self.concurrency is not None and self.concurrency < 1:
            raise ValueError(f"concurrency: got {self.concurrency}, expected at least 1")
        if not 0 <= self.first_id < self.vocab:
            raise ValueError(f"vocab: got {self.vocab}, expected more than {self.first_id}")

    def bodies(self) -> list[dict[str, Any]]:
        """Return the requests."""
        draw = random.Random(self.seed)
        extra = {"ignore_eos": True} if self.ignore_eos else {}
        return [
            {
                "model": self.model,
                "prompt": [draw.randrange(self.first_id, self.vocab) for _ in range(each.prompt)],
                "max_tokens": each.output,
                "temperature": 0,
                "stream": True,
                "stream_options": {"include_usage": True},
                **extra,
            }
            for each in self.lengths
        ]


def log_uniform(low: int, high: int, output: int, count: int, seed: int = 0) -> list[Lengths]:
    """Return `count` lengths: prompts log-uniform from `low` to `high` tokens.

    Raises:
        ValueError: when a length is out of range.
    """
    if not 1 <= low <= high:
        raise ValueError(f"prompt: got {low} to {high} tokens, expected 1 <= LOW <= HIGH")
    if output < 1 or count < 1:
        raise ValueError(f"output, requests: got {output}, {count}, expected at least 1")
    draw = random.Random(seed)
    return [
        Lengths(round(math.exp(draw.uniform(math.log(low), math.log(high)))), output)
        for _ in range(count)
    ]


def read_lengths(file: Path, count: int) -> list[Lengths]:
    """Return the lengths of a file, a JSON list `[prompt, output]` per line, repeated to `count`.

    Raises:
        OSError: when it cannot be read.
        ValueError: naming the line that is malformed.
    """
    found = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            prompt, output = json.loads(line)
            good = type(prompt) is int and type(output) is int and min(prompt, output) > 0
        except (ValueError, TypeError):
            good = False
        if not good:
            raise ValueError(f"{file}: line {number}: expected [prompt tokens, output tokens]")
        found.append(Lengths(prompt, output))
    if not found:
        raise ValueError(f"{file}: got no lengths, expected some")
    return [found[at % len(found)] for at in range(count)]


async def send_all(
    server: Server, load: Load, *, on_end: Callable[[], None] = lambda: None
) -> tuple[list[Stream], float]:
    """Send all requests and return what each saw, in order, and the seconds that all took.

    Args:
        server: gets them.
        load: which, and when.
        on_end: called when a request ends.
    """
    bodies = load.bodies()
    draw = random.Random(load.seed)
    free = asyncio.Semaphore(load.concurrency or len(bodies))
    started = time.perf_counter()

    async def send(body: dict[str, Any]) -> Stream:
        try:
            return await server.stream(body)
        finally:
            free.release()
            on_end()

    tasks = []
    moment = started
    for body in bodies:
        if load.rate is not None:
            # The moments are those of the load, however late the requests before are.
            moment += draw.expovariate(load.rate)
            await asyncio.sleep(max(0.0, moment - time.perf_counter()))
        await free.acquire()
        tasks.append(asyncio.create_task(send(body)))
    streams = await asyncio.gather(*tasks)
    return list(streams), time.perf_counter() - started
