"""A small step with two inputs, for the tests of `ostinato.graphs`."""

import torch

from ostinato.graphs import BatchView, BufferSpec

WIDTH = 3
PAD_TOKEN = 7


def random_tokens(generator: torch.Generator, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randint(0, 100, shape, generator=generator)


def random_hidden(generator: torch.Generator, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randn(shape, generator=generator)


SPECS = {
    "tokens": BufferSpec((), torch.int64, PAD_TOKEN, random_tokens),
    "hidden": BufferSpec((WIDTH,), torch.float32, -1.0, random_hidden),
}


class ToyStep:
    """Row-wise arithmetic without rounding traps; remembers the batch sizes it was called with."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def __call__(self, batch: BatchView) -> dict[str, torch.Tensor]:
        self.calls.append(batch.size)
        scaled = batch.hidden * batch.tokens[:, None]
        return {"tokens": 2 * batch.tokens + 1, "hidden": scaled.tanh()}


def toy_inputs(n: int, device: torch.device | str = "cpu") -> dict[str, torch.Tensor]:
    return {
        "tokens": torch.randint(0, 100, (n,)).to(device),
        "hidden": torch.randn(n, WIDTH).to(device),
    }
