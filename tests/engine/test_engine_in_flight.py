"""Tokens on their way to the host."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ostinato.engine.in_flight import TokensInFlight


def add(flight: TokensInFlight, tokens: torch.Tensor) -> list[Any]:
    requests: list[Any] = [SimpleNamespace(in_flight=0, finish_reason=None) for _ in tokens]
    flight.add(requests, tokens, [], 0.0)
    return requests


def test_a_launch_that_was_forgotten_hands_out_nothing(device: torch.device) -> None:
    flight = TokensInFlight(device)
    add(flight, torch.arange(3, device=device))
    flight.clear()
    later = add(flight, torch.arange(5, 9, device=device))
    read: list[tuple[Any, int]] = []
    flight.read(lambda request, token: read.append((request, token)))
    assert read == list(zip(later, range(5, 9), strict=True))
    assert len(flight) == 0


@pytest.mark.gpu
def test_memory_that_is_still_written_is_not_given_back() -> None:
    device = torch.device("cuda", 0)
    flight = TokensInFlight(device)
    torch.cuda._sleep(100_000_000)
    add(flight, torch.arange(3, device=device))
    flight.clear()
    assert torch.cuda.current_stream(device).query()
