"""Norms of a decoder: RMS norm and layer norm, alone or with the quantisation that follows."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from .. import ops
from ..ops.collective.communicator import Communicator
from ..ops.collective.partial_sum import PartialSum
from .kinds import InputKind, NormKind

# Rows [M, K], or what this rank adds to them.
Addend = torch.Tensor | PartialSum

_NORMALIZE: dict[str, Callable[..., Any]] = {
    "rms_norm": ops.rms_norm,
    "layer_norm": ops.layer_norm,
}
_QUANTIZE: dict[str, Callable[..., tuple[torch.Tensor, ...]]] = {
    "rms_norm": ops.rms_norm_quantize,
    "layer_norm": ops.layer_norm_quantize,
}
_QUANTIZE_PER_GROUP: dict[str, Callable[..., tuple[torch.Tensor, ...]]] = {
    "rms_norm": ops.rms_norm_quantize_per_group,
    "layer_norm": ops.layer_norm_quantize_per_group,
}
_QUANTIZE_ASYMMETRIC: dict[str, Callable[..., tuple[torch.Tensor, ...]]] = {
    "rms_norm": ops.rms_norm_quantize_asymmetric,
    "layer_norm": ops.layer_norm_quantize_asymmetric,
}


@dataclass(frozen=True)
class NormConfig:
    """The norms of a decoder.

    Args:
        eps: added to the mean of squares.
        kind: "rms_norm" or "layer_norm".
        has_bias: whether there is a bias, of layer norms alone.
        plus_one: whether a file stores weights less 1.
    """

    eps: float
    kind: NormKind = "rms_norm"
    has_bias: bool = False
    plus_one: bool = False

    @property
    def input_kind(self) -> InputKind:
        """What a linear layer after such a norm says of its input: see `fp32_kind`."""
        return fp32_kind(self.kind) if self.plus_one else self.kind


def fp32_kind(kind: NormKind) -> InputKind:
    """Return the kind of a norm whose weight is in fp32 whatever the model's dtype."""
    return "rms_norm_fp32" if kind == "rms_norm" else "layer_norm_fp32"


@dataclass(frozen=True)
class Norm:
    """A norm of rows [M, K], or for "layer_norm" of heads [M, H, K].

    `weight` [K], or [H, K], of the model's dtype or fp32; `bias` likewise, of layer norms alone.
    Of a rank's part of a sum it is the sum over all ranks that is normalised.
    """

    weight: torch.Tensor
    eps: float
    kind: NormKind = "rms_norm"
    bias: torch.Tensor | None = None

    def __call__(self, x: Addend) -> torch.Tensor:
        """Return x normalised."""
        if isinstance(x, PartialSum):
            return self.of_sum(x, None)[0]
        normed: torch.Tensor = self._call(_NORMALIZE, x)
        return normed

    def of_sum(self, x: Addend, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return x plus the residual, normalised, and the sum; without one that is x itself."""
        if isinstance(x, PartialSum) and self.kind == "rms_norm":
            return ops.all_reduce_norm(*self._of_ranks(x), residual=residual)
        x = summed(x)
        if residual is None:
            return self(x), x
        normed, total = self._call(_NORMALIZE, x, residual=residual)
        return normed, total

    def quantize(
        self, x: Addend, residual: torch.Tensor | None, dtype: torch.dtype, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Do as `of_sum`, and quantise; return (values, scale [M], the sum).

        `options` are those of `ops.rms_norm_quantize`.
        """
        if isinstance(x, PartialSum) and self.kind == "rms_norm":
            return ops.all_reduce_norm_quantize(
                *self._of_ranks(x), dtype, residual=residual, **options
            )
        x = summed(x)
        values, scale, *total = self._call(_QUANTIZE, x, dtype, residual=residual, **options)
        return values, scale, total[0] if total else x

    def quantize_per_group(
        self, x: Addend, residual: torch.Tensor | None, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Do as `quantize`, by groups; `options` are those of `ops.rms_norm_quantize_per_group`."""
        if isinstance(x, PartialSum) and self.kind == "rms_norm":
            return ops.all_reduce_norm_quantize_per_group(
                *self._of_ranks(x), residual=residual, **options
            )
        x = summed(x)
        values, scale, *total = self._call(_QUANTIZE_PER_GROUP, x, residual=residual, **options)
        return values, scale, total[0] if total else x

    def quantize_asymmetric(
        self, x: Addend, residual: torch.Tensor | None, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Do as `of_sum`, and quantise; return (values, scale [M], zero points [M], the sum).

        `options` are those of `ops.rms_norm_quantize_asymmetric`.
        """
        x = summed(x)
        values, scale, zero_point, *total = self._call(
            _QUANTIZE_ASYMMETRIC, x, residual=residual, **options
        )
        return values, scale, zero_point, total[0] if total else x

    def scaled(self, factor: float) -> Norm:
        """Return the norm for results times `factor`; nothing is rounded to 16 bits."""

        def times(x: torch.Tensor) -> torch.Tensor:
            return x * factor if is_power_of_two(factor) else x.float() * factor

        bias = None if self.bias is None else times(self.bias)
        return replace(self, weight=times(self.weight), bias=bias)

    def _of_ranks(self, x: PartialSum) -> tuple[torch.Tensor, Communicator, torch.Tensor, float]:
        """Return the first arguments of the ops that add up x and normalise it."""
        return x.values, x.communicator, self.weight, self.eps

    def _call(
        self, of_kind: dict[str, Callable[..., Any]], x: torch.Tensor, *more: Any, **options: Any
    ) -> Any:
        if self.bias is not None:
            options["bias"] = self.bias
        return of_kind[self.kind](x, self.weight, self.eps, *more, **options)


def summed(x: Addend) -> torch.Tensor:
    """Return rows, added up over the ranks if x is a rank's part of them."""
    return x.sum() if isinstance(x, PartialSum) else x


def is_power_of_two(number: float) -> bool:
    """Return whether multiplying by a positive number changes nothing but the exponent."""
    return math.frexp(number)[0] == 0.5
