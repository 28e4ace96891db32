"""Weights of a model's shape that are never written, to ask which kernels the model launches."""

from __future__ import annotations

from typing import Any

import torch

from ostinato.bench.weights import _RandomLoader, dtype_named
from ostinato.models import DenseLinear, W8A8Linear
from ostinato.models.experts.products import W8A8Experts
from ostinato.models.parts import ExpertsPart


class Hollow(_RandomLoader):
    """Weights that are never written, so take no time and no memory."""

    def _normal(self, rows: int, columns: int, **drawn: Any) -> torch.Tensor:
        return torch.empty(rows, columns, dtype=torch.bfloat16)

    def _linear(
        self, shape: tuple[int, int], precision: str, out: torch.dtype, **drawn: Any
    ) -> DenseLinear | W8A8Linear:
        if precision == "bf16":
            return DenseLinear(torch.empty(shape, dtype=torch.bfloat16), out_dtype=out)
        codes = torch.empty(shape, dtype=dtype_named(precision))
        return W8A8Linear(codes, torch.empty(shape[0]), out, batch_invariant=True)

    def experts(self, part: ExpertsPart) -> W8A8Experts:
        shape = (part.num_experts, *part.shape)
        codes = torch.empty(shape, dtype=dtype_named(self.precision))
        return W8A8Experts(codes, part.gated, torch.empty(shape[:2]), torch.bfloat16)
