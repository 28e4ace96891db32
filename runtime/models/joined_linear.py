"""Linear layers whose rows are stored in different ways: one product for each run of rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .. import ops
from ..jit.variant import Variant
from ..ops.linear.quantize_cuda import quantize_kernel
from .layers import InputKind, Linear


@dataclass
class JoinedLinear(Linear):
    """y = [y₁ | y₂ | …] of layers that read the same x.

    Each part quantises x as it would alone, and adds a copy of its results to those of a layer that
    is stored in one way.

    `parts` are two or more layers with equal K and dtypes of results.
    """

    parts: tuple[Linear, ...]

    @property
    def shape(self) -> tuple[int, int]:
        return sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]

    @property
    def weight_dtype(self) -> torch.dtype:
        """The widest dtype of the parts' weights."""
        return max((part.weight_dtype for part in self.parts), key=lambda dtype: dtype.itemsize)

    def kernels(self, kind: InputKind, dtype: torch.dtype) -> list[Variant]:
        """Return those of every part; a gate is a kernel of its own."""
        found: list[Variant] = []
        if kind == "silu_mul":
            kind = "per_token"
            found.append(quantize_kernel("silu_mul", dtype, dtype))
        for part in self.parts:
            found += part.kernels(kind, dtype)
        return found

    def __call__(self, x: torch.Tensor, n_active: torch.Tensor | None = None) -> torch.Tensor:
        return torch.cat([part(x, n_active) for part in self.parts], dim=1)

    def after_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        norm: torch.Tensor,
        eps: float,
        n_active: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        first, *others = self.parts
        y, total = first.after_norm(x, residual, norm, eps, n_active)
        results = [part.after_norm(total, None, norm, eps, n_active)[0] for part in others]
        return torch.cat([y, *results], dim=1), total

    def after_silu_mul(
        self, gate_up: torch.Tensor, n_active: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self(ops.silu_mul(gate_up), n_active)

    def with_factors(self, factors: torch.Tensor) -> Linear | None:
        sizes = [part.shape[0] for part in self.parts]
        parts = [
            part.with_factors(own)
            for part, own in zip(self.parts, factors.split(sizes), strict=True)
        ]
        folded = tuple(part for part in parts if part is not None)
        return JoinedLinear(folded) if len(folded) == len(parts) else None

    def scaled(self, norm: torch.Tensor, factor: float) -> tuple[Linear, torch.Tensor]:
        raise ValueError("parts: got several, expected one in a layer whose results are scaled")


def join(parts: Sequence[Linear]) -> Linear:
    """Return the layer whose rows are those of one or more layers, one after another."""
    return parts[0] if len(parts) == 1 else JoinedLinear(tuple(parts))
