"""RMS norms by `ops.rms_norm`, as the provider `ostinato` of vLLM's IR ops.

vLLM takes it where the option `ir_op_priority` names it (docs/integrations/vllm.md).
"""

from __future__ import annotations

from typing import cast

import torch
from vllm import ir

from ... import ops
from .packed_layer import rows_of

PROVIDER = "ostinato"


def register() -> None:
    """Register the provider for both norms, once."""
    plain, adding = ir.ops.rms_norm, ir.ops.fused_add_rms_norm
    if PROVIDER not in plain.impls:
        plain.register_impl(PROVIDER, supports_args=_takes)(_rms_norm)
        adding.register_impl(PROVIDER, supports_args=_takes_sum)(_fused_add_rms_norm)


def _takes(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> bool:
    return (
        variance_size is None
        and weight is not None
        and weight.dtype in (x.dtype, torch.float32)
        and x.stride(-1) == 1
    )


def _takes_sum(
    x: torch.Tensor,
    x_residual: torch.Tensor,
    weight: torch.Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> bool:
    return x_residual.dtype == x.dtype and _takes(x, weight, epsilon, variance_size)


def _rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> torch.Tensor:
    return cast(torch.Tensor, ops.rms_norm(rows_of(x), _given(weight), epsilon)).view(x.shape)


def _fused_add_rms_norm(
    x: torch.Tensor,
    x_residual: torch.Tensor,
    weight: torch.Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, residual = rows_of(x), rows_of(x_residual)
    normed, total = ops.rms_norm(rows, _given(weight), epsilon, residual=residual)
    return normed.view(x.shape), total.view(x.shape)


def _given(weight: torch.Tensor | None) -> torch.Tensor:
    """Return a weight that `_takes` has seen to be there."""
    return cast(torch.Tensor, weight)
