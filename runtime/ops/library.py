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
    for device in ("CPU", "CUDA"):
        # Autograd would otherwise record the torch ops within, and refuse those that mutate.
        _LIBRARY.impl(name, torch.no_grad()(implementation), device)
    torch.library.register_fake(f"ostinato::{name}", _fake, lib=_LIBRARY)
    op: Callable[..., None] = getattr(torch.ops.ostinato, name).default
    return op


def _fake(*_args: Any, **_kwargs: Any) -> None:
    pass
