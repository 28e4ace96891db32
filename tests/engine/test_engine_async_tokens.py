"""Tokens on their way to the host."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ostinato.engine import async_tokens
from ostinato.engine.async_tokens import AsyncTokens


def add(flight: AsyncTokens, tokens: torch.Tensor) -> list[Any]:
    requests: list[Any] = [
        SimpleNamespace(id=at, async_tokens=0, finish_reason=None) for at in range(len(tokens))
    ]
    flight.add(requests, tokens, [], 0.0)
    return requests


def test_a_launch_that_was_forgotten_hands_out_nothing(device: torch.device) -> None:
    flight = AsyncTokens(device)
    add(flight, torch.arange(3, device=device))
    flight.clear()
    later = add(flight, torch.arange(5, 9, device=device))
    read: list[tuple[Any, int]] = []
    flight.read(lambda request, token, _: read.append((request, token)))
    assert read == list(zip(later, range(5, 9), strict=True))
    assert len(flight) == 0


def test_on_the_cpu_a_launch_takes_no_time_of_the_one_behind_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    monkeypatch.setattr(async_tokens, "time", SimpleNamespace(perf_counter=lambda: now))
    flight = AsyncTokens(torch.device("cpu"))
    seconds: list[float] = []
    for started, ended in ((1.0, 3.0), (4.0, 9.0), (9.0, 10.0)):
        now = ended  # the step has run when its launch is added
        flight.add([], torch.empty(0, dtype=torch.int64), [seconds], started)
        now += 0.5
        flight.read(lambda *_: None, max(0, len(flight) - 1))
    flight.read(lambda *_: None)
    assert seconds == [2.0, 5.0, 1.0]


@pytest.mark.gpu
def test_memory_that_is_still_written_is_not_given_back() -> None:
    device = torch.device("cuda", 0)
    flight = AsyncTokens(device)
    torch.cuda._sleep(100_000_000)
    add(flight, torch.arange(3, device=device))
    flight.clear()
    assert torch.cuda.current_stream(device).query()


def test_work_that_samples_nothing_is_waited_for_and_timed(device: torch.device) -> None:
    flight = AsyncTokens(device)
    sampled = add(flight, torch.arange(2, device=device))
    seconds: list[float] = []
    flight.add([], torch.empty(0, dtype=torch.int64, device=device), [seconds], 0.0)
    assert flight.last_tokens(sampled).tolist() == [0, 1]
    read: list[tuple[Any, int]] = []
    flight.read(lambda request, token, _: read.append((request, token)))
    assert read == [(sampled[0], 0), (sampled[1], 1)]
    assert len(seconds) == 1
    assert len(flight) == 0
