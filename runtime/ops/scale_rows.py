"""Multiplying rows by numbers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch

from ..jit.loader import load
from ..jit.registry import register_family
from ..jit.sources import CSRC
from ..jit.variant import OneDtypeVariant
from .common import checks, pdl
from .common.device import KERNEL_NAMES, current_stream, has_kernel, on_device
from .common.torch_library import register


@dataclass(frozen=True, kw_only=True)
class ScaleRows(OneDtypeVariant):
    """The kernel; `dtype` is that of the rows."""

    family: ClassVar[str] = "scale_rows"
    source: ClassVar[Path] = CSRC / "scale_rows" / "scale_rows.cu"
    needs: ClassVar[frozenset[str]] = frozenset()


register_family(ScaleRows, [ScaleRows(dtype=dtype) for dtype in ("bf16", "fp32")])


def scale_rows(
    x: torch.Tensor, scale: torch.Tensor, *, stream: checks.Stream = None
) -> torch.Tensor:
    """Return x[i, j]·scale[i].

    Args:
        x: [M, K] bf16 or fp32.
        scale: [M] fp32.
        stream: see `ostinato.ops`.

    Returns:
        [M, K] of x's dtype.

    Raises:
        TypeError, ValueError: naming the argument, before anything is launched.
    """
    checks.tensor("x", x, (torch.bfloat16, torch.float32), ("M", "K"))
    checks.tensor("scale", scale, (torch.float32,), (x.size(0),), x.device)
    with checks.launch_stream(stream, x.device):
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        _op(x, scale, out)
    return out


def _scale_rows(x: torch.Tensor, scale: torch.Tensor, out: torch.Tensor) -> None:
    if not has_kernel(ScaleRows, x):
        out.copy_(x.float() * scale[:, None])
        return
    device = x.get_device()
    with on_device(device):
        stream = current_stream(device)
        kernel = ScaleRows(dtype=KERNEL_NAMES[x.dtype])
        load(kernel, device=device, stream=stream).launch(
            x=x.data_ptr(),
            x_stride=x.stride(0),
            scale=scale.data_ptr(),
            out=out.data_ptr(),
            rows=x.size(0),
            dim=x.size(1),
            pdl=pdl.enabled(),
            stream=stream,
        )


_op = register("scale_rows(Tensor x, Tensor scale, Tensor(a!) out) -> ()", _scale_rows)
