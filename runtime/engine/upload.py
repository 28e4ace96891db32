"""From the host to the engine's device, without waiting for it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


def upload(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor of the host on the device, ordered on the current stream.

    A copy from pageable memory would wait for all that the stream has to do: of a prompt's six
    inputs each for what came before it.
    """
    if device.type != "cuda":
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)


def by_default_on_the_host(method: Callable[P, T]) -> Callable[P, T]:
    """Let tensors for which no device is said be on the host, whatever torch's default device."""

    @functools.wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        # The context costs every call of torch within it.
        if torch.get_default_device().type == "cpu":
            return method(*args, **kwargs)
        with torch.device("cpu"):
            return method(*args, **kwargs)

    return call
