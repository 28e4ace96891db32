"""Registration of the ops with `torch.library`, so that torch.compile and export can trace them.

Checks that must read data on the host are part of an op's implementation, which tracing does not
enter; those of shapes, dtypes and numbers come before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_LIBRARY = torch.library.Library("ostinato", "DEF")


def register(schema: str, implementation: Callable[..., None]) -> Callable[..., None]:
    """Define the op `ostinato::<schema>` for CPU and CUDA tensors and return its callable.

    Every op writes into tensors that its schema marks as mutated and returns nothing, so the fake
    implementation that tracing needs has nothing to do.
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)
    for device in ("cpu", "cuda"):
        _LIBRARY.impl(name, _as_it_is(implementation, device), device.upper())
    torch.library.register_fake(f"ostinato::{name}", _fake, lib=_LIBRARY)
    op: Callable[..., None] = getattr(torch.ops.ostinato, name).default
    return op


def _as_it_is(implementation: Callable[..., None], device: str) -> Callable[..., None]:
    """Return the implementation without autograd and autocast.

    The first would record the torch ops within, and refuse those that mutate; the second would
    have them multiply in 16 bits.
    """

    def call(*arguments: Any) -> None:
        # A launch takes the host not much longer than such a context, which is rarely needed.
        if torch.is_autocast_enabled(device):
            with torch.autocast(device, enabled=False):
                call(*arguments)
        elif torch.is_grad_enabled():
            with torch.no_grad():
                implementation(*arguments)
        else:
            implementation(*arguments)

    return call


def _fake(*_args: Any, **_kwargs: Any) -> None:
    pass
