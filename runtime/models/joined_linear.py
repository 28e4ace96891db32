"""Linear layers whose rows are stored in different ways: one product for each run of rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .. import ops
from ..jit.variant import Variant
from ..ops.linear.quantize_cuda import ACTIVATIONS, input_kernel
from .kinds import Activation, InputKind
from .layers import Linear
from .norms import Addend, Norm


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
        """Return those of every part; an activation is a kernel of its own."""
        found: list[Variant] = []
        if kind in ACTIVATIONS:
            found.append(input_kernel(kind, dtype, dtype))
            kind = "per_token"
        for part in self.parts:
            found += part.kernels(kind, dtype)
        return found

    def __call__(self, x: torch.Tensor, n_active: torch.Tensor | None = None) -> torch.Tensor:
        return torch.cat([part(x, n_active) for part in self.parts], dim=1)

    def after_norm(
        self,
        x: Addend,
        residual: torch.Tensor | None,
        norm: Norm,
        n_active: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        first, *others = self.parts
        y, total = first.after_norm(x, residual, norm, n_active)
        results = [part.after_norm(total, None, norm, n_active)[0] for part in others]
        return torch.cat([y, *results], dim=1), total

    def after_activation(
        self, x: torch.Tensor, kind: Activation, n_active: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self(ops.activation(x, kind), n_active)

    def with_factors(self, factors: torch.Tensor) -> Linear | None:
        sizes = [part.shape[0] for part in self.parts]
        parts = [
            part.with_factors(own)
            for part, own in zip(self.parts, factors.split(sizes), strict=True)
        ]
        folded = tuple(part for part in parts if part is not None)
        return JoinedLinear(folded) if len(folded) == len(parts) else None

    def scaled(self, norm: Norm, factor: float) -> tuple[Linear, Norm]:
        raise ValueError("parts: got several, expected one in a layer whose results are scaled")


def join(parts: Sequence[Linear]) -> Linear:
    """Return the layer whose rows are those of one or more layers, one after another."""
    return parts[0] if len(parts) == 1 else JoinedLinear(tuple(parts))
