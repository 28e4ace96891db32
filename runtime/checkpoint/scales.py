"""Reads and joins quantisation parameters, refusing those that are no numbers."""

from __future__ import annotations

import torch

from ..models.modules import TensorSpec
from .errors import CheckpointError, UnsupportedCheckpointError
from .reader import CheckpointReader

_INT8_MIN, _INT8_MAX = -128, 127


def read_scale(
    reader: CheckpointReader, spec: TensorSpec, *, positive: bool = False
) -> torch.Tensor:
    """Return a scale as fp32 [n], n = 1 for a scalar.

    Args:
        reader: of a checked checkpoint.
        spec: the scale.
        positive: refuse 0 too. A weight scale may be 0, that of a row of zeros.

    Raises:
        CheckpointError: naming the file and the tensor, for NaN, an infinity or a negative value.
    """
    scale = reader.read(spec).float().reshape(-1)
    valid = scale.isfinite() & ((scale > 0) if positive else (scale >= 0))
    if not valid.all():
        at = int((~valid).nonzero()[0])
        bound = "above 0" if positive else "of at least 0"
        raise CheckpointError(
            f"{reader.where(spec)}: got {scale[at].item()} at index {at}, expected a finite "
            f"number {bound}"
        )
    return scale


def read_zero_point(reader: CheckpointReader, spec: TensorSpec) -> torch.Tensor:
    """Return a zero point as int32 [1].

    Raises:
        CheckpointError: naming the file and the tensor, when it is no INT8 value.
    """
    zero_point = reader.read(spec).to(torch.int32).reshape(-1)
    if not _INT8_MIN <= int(zero_point) <= _INT8_MAX:
        raise CheckpointError(
            f"{reader.where(spec)}: got {int(zero_point)}, expected {_INT8_MIN} to {_INT8_MAX}"
        )
    return zero_point


def require_zero(reader: CheckpointReader, spec: TensorSpec) -> None:
    """Check that a zero point which symmetric quantisation has no use for is 0, or absent.

    Raises:
        UnsupportedCheckpointError: naming the file and the tensor, when it is not.
    """
    if reader.has(spec) and reader.read(spec).any():
        raise UnsupportedCheckpointError(
            f"{reader.where(spec)}: holds zero points other than 0, although config.json says "
            "that the quantisation is symmetric"
        )


def merge_asymmetric(
    scales: torch.Tensor, zero_points: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return one asymmetric INT8 quantisation that covers what each of several covers.

    A scale s and a zero point z represent the numbers s·(-128 - z) to s·(127 - z). Equal
    quantisations are returned as they are; others are replaced by that of their joint range.

    Args:
        scales: [n] fp32, positive.
        zero_points: [n] int32.

    Returns:
        (scale fp32 scalar, zero_point int32 scalar).
    """
    if scales.eq(scales[0]).all() and zero_points.eq(zero_points[0]).all():
        return scales[0].clone(), zero_points[0].clone()
    wide = scales.double()
    low = (wide * (_INT8_MIN - zero_points)).min()
    high = (wide * (_INT8_MAX - zero_points)).max()
    scale = (high - low) / (_INT8_MAX - _INT8_MIN)
    zero_point = (_INT8_MIN - low / scale).round()
    return scale.float(), zero_point.to(torch.int32)
