"""The readable twins of collectives; see `ostinato.ops.reference`.

Where an op takes x of one rank and its communicator, its twin takes `parts`, x of all ranks in rank
order, and returns what every rank gets.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..linear.reference_rows import rms_norm, rms_norm_quantize, rms_norm_quantize_per_group


def all_reduce(
    parts: Sequence[torch.Tensor], *, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Add up the ranks' rows, one after the other."""
    total = parts[0].to(dtype)
    for part in parts[1:]:
        total = total + part.to(dtype)
    return total


def all_gather(
    parts: Sequence[torch.Tensor], *, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Put the ranks' columns beside each other."""
    return torch.cat([part.to(dtype) for part in parts], dim=1)


def all_reduce_norm(
    parts: Sequence[torch.Tensor],
    weight: torch.Tensor,
    eps: float,
    *,
    residual: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (the norm of the rounded sum, that sum); both with the residual, if given."""
    total = _total(parts, residual, dtype)
    return rms_norm(total, weight, eps, dtype=dtype), total


def all_reduce_norm_quantize(
    parts: Sequence[torch.Tensor],
    weight: torch.Tensor,
    eps: float,
    dtype: torch.dtype,
    *,
    residual: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (values of `dtype`, scale of each row, the sum); as `rms_norm_quantize`."""
    total = _total(parts, residual, torch.float32)
    values, scale = rms_norm_quantize(total, weight, eps, dtype, **options)
    return values, scale, total


def all_reduce_norm_quantize_per_group(
    parts: Sequence[torch.Tensor],
    weight: torch.Tensor,
    eps: float,
    *,
    residual: torch.Tensor | None = None,
    power_of_two: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (e4m3 values, scales [groups, rows], the sum)."""
    total = _total(parts, residual, torch.float32)
    values, scale = rms_norm_quantize_per_group(total, weight, eps, power_of_two=power_of_two)
    return values, scale, total


def _total(
    parts: Sequence[torch.Tensor], residual: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """Return the sum of all, which is rounded to the dtype of x: before the residual, too."""
    summed = all_reduce(parts, dtype=dtype).to(parts[0].dtype)
    return summed if residual is None else summed + residual
