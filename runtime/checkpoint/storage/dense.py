"""Weights in 16 or 32 bits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from ...jit.variant import Variant
from ...models.experts.products import DenseExperts, experts_kernels
from ...models.kinds import InputKind
from ...models.layers import DenseLinear, dense_kernels
from ...models.modules import Module, TensorSpec
from ...models.parts import ExpertsPart
from ..reader import CheckpointReader
from .base import StoredScheme, Target, biases, stack, weight_of


@dataclass(frozen=True)
class DenseScheme(StoredScheme):
    """A weight in 16 or 32 bits, as it is."""

    def __str__(self) -> str:
        """Return what messages say of it."""
        return "not quantised"

    def weight(self, module: Module) -> TensorSpec:
        """Return the weight of a module."""
        shape = (module.rows, module.columns)
        if not module.transposable:
            return module.tensor("weight", shape)
        return replace(module.tensor("weight", shape, shape[::-1]), transposable=True)

    def tensors(self, module: Module) -> Iterator[TensorSpec]:
        """Yield weight and bias."""
        yield self.weight(module)
        if module.bias is not None:
            yield module.bias

    def kernels(
        self,
        kind: InputKind,
        shape: tuple[int, int],
        dtype: torch.dtype,
        *,
        batch_invariant: bool,
        device: torch.device | None,
        out_dtype: torch.dtype | None = None,
    ) -> list[Variant]:
        """Return the norm or activation before the layer, and what multiplies."""
        return dense_kernels(kind, shape, dtype, out_dtype=out_dtype, device=device)

    def build(
        self, reader: CheckpointReader, modules: Sequence[Module], target: Target
    ) -> DenseLinear:
        """Return the layer in the target's dtype."""
        bias = biases(reader, modules, target)
        return DenseLinear(self.plain(reader, modules, target), bias, target.results)

    def build_experts(
        self, reader: CheckpointReader, part: ExpertsPart, target: Target
    ) -> DenseExperts:
        """Return the grouped products in the target's dtype."""
        weight = self.plain(reader, tuple(part.stored()), target)
        return DenseExperts(weight.view(part.num_experts, *part.shape), part.gated)

    def experts_kernels(self, dtype: torch.dtype, *, out_dtype: torch.dtype) -> list[Variant]:
        """Return what the products launch."""
        return experts_kernels(dtype, dtype, out_dtype)

    def plain(
        self, reader: CheckpointReader, modules: Sequence[Module], target: Target
    ) -> torch.Tensor:
        """Return the weight [N, K] of the layer in the target's dtype."""
        weights = [weight_of(module, self.weight(module)) for module in modules]
        return stack(reader, weights, target.dtype, target.device)


DENSE = DenseScheme()


def unquantized(*_names: str) -> DenseScheme:
    """Return how every module of a plain checkpoint is stored."""
    return DENSE
