"""Which backend serves a device."""

from __future__ import annotations

import torch

from ..inspect.cuda import PoolHandle
from .base import Backend
from .cpu import CpuBackend
from .cuda import CudaBackend


def backend_for(
    device: torch.device, pool: PoolHandle | None, stream: torch.cuda.Stream | None
) -> Backend:
    """Return a new backend; `pool` and `stream` are of CUDA alone.

    Raises:
        TypeError, ValueError: for a pool or a stream that cannot be used there.
    """
    if device.type == "cuda":
        return CudaBackend(device, pool, stream)
    for name, value in (("pool", pool), ("stream", stream)):
        if value is not None:
            raise ValueError(f"{name}: got {value!r}, expected None for buffers on {device}")
    return CpuBackend()
