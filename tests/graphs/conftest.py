"""Buffers and runners over the toy step."""

from collections.abc import Callable, Iterator

import pytest
import torch
from graphs_toys import SPECS, ToyStep

from ostinato.graphs import BatchView, GraphRunner, StaticBuffers


@pytest.fixture
def step() -> ToyStep:
    return ToyStep()


@pytest.fixture
def buffers(device: torch.device) -> StaticBuffers:
    return StaticBuffers(SPECS, 8, device)


@pytest.fixture
def make_runner(device: torch.device) -> Iterator[Callable[..., GraphRunner]]:
    """Make runners over the toy buffers, closed when the test ends."""
    runners = []

    def make(step: Callable[[BatchView], object], max_batch: int = 8, **options) -> GraphRunner:
        runners.append(GraphRunner(step, StaticBuffers(SPECS, max_batch, device), **options))
        return runners[-1]

    yield make
    for runner in runners:
        runner.close()
