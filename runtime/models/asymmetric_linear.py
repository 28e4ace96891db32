"""INT8 linear layers whose activations have a scale and a zero point for each token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from .. import ops
from .kinds import Activation
from .layers import W8A8Linear
from .norms import Addend, Norm


@dataclass
class AsymmetricLinear(W8A8Linear):
    """y = s_x·s_w·(q_x·Wᵀ - z_x·Σ W) + b, with s_x and z_x of each token, found at run time.

    Its tensors are those of `W8A8Linear`, int8 and without an `input_scale`; `weight_sum` is made
    from `weight` when None, which must be plain then.
    """

    _asymmetric: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.weight_sum is None and isinstance(self.weight, torch.Tensor):
            self.weight_sum = self.weight.sum(1, dtype=torch.int32)
        super().__post_init__()

    def __call__(self, x: torch.Tensor, n_active: torch.Tensor | None = None) -> torch.Tensor:
        """Map x [M, K] (16- or 32-bit) to [M, N] in `out_dtype`."""
        quantized, scale, zero_point = ops.quantize_asymmetric(x, n_active=n_active)
        return self._matmul(quantized, scale, n_active, zero_point)

    def after_norm(
        self,
        x: Addend,
        residual: torch.Tensor | None,
        norm: Norm,
        n_active: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        quantized, scale, zero_point, total = norm.quantize_asymmetric(
            x, residual, n_active=n_active
        )
        return self._matmul(quantized, scale, n_active, zero_point), total

    def after_activation(
        self, x: torch.Tensor, kind: Activation, n_active: torch.Tensor | None = None
    ) -> torch.Tensor:
        quantized, scale, zero_point = ops.activation_quantize_asymmetric(
            x, kind, n_active=n_active, discard_x=True
        )
        return self._matmul(quantized, scale, n_active, zero_point)
