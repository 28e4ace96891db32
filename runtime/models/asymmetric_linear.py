"""INT8 linear layers whose activations have a scale and a zero point for each token."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .. import ops
from ..jit.variant import Variant
from ..ops.linear.precompile import layer_kernels
from .kinds import Activation, InputKind
from .layers import Linear, Sampling, W8A8Linear
from .norms import Norm


@dataclass
class AsymmetricLinear(W8A8Linear):
    """y = s_x·s_w·(q_x·Wᵀ - z_x·Σ W) + b, with s_x and z_x of each token, found at run time.

    Its tensors are those of `W8A8Linear`, int8 and without an `input_scale`; `weight_sum` is made
    from `weight` when None, which must be plain then.
    """

    def __post_init__(self) -> None:
        if self.weight_sum is None and isinstance(self.weight, torch.Tensor):
            self.weight_sum = self.weight.sum(1, dtype=torch.int32)
        super().__post_init__()

    def kernels(self, kind: InputKind, dtype: torch.dtype) -> list[Variant]:
        device = self.weight_scale.device
        return layer_kernels(
            kind,
            self.shape,
            self.weight_dtype,
            dtype,
            out_dtype=self.out_dtype,
            batch_invariant=self.batch_invariant,
            asymmetric=True,
            device=device if device.type == "cuda" else None,
        )

    def __call__(self, x: torch.Tensor, n_active: torch.Tensor | None = None) -> torch.Tensor:
        """Map x [M, K] (16- or 32-bit) to [M, N] in `out_dtype`."""
        quantized, scale, zero_point = ops.quantize_asymmetric(x, n_active=n_active)
        return self._matmul(quantized, scale, n_active, zero_point)

    def after_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        norm: Norm,
        n_active: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        quantized, scale, zero_point, total = norm.quantize_asymmetric(
            x, residual, n_active=n_active
        )
        return self._matmul(quantized, scale, n_active, zero_point), total

    def logits_after_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        norm: Norm,
        sampling: Sampling,
        n_active: torch.Tensor | None = None,
    ) -> ops.Logits:
        return Linear.logits_after_norm(self, x, residual, norm, sampling, n_active)

    def after_activation(
        self, x: torch.Tensor, kind: Activation, n_active: torch.Tensor | None = None
    ) -> torch.Tensor:
        quantized, scale, zero_point = ops.activation_quantize_asymmetric(
            x, kind, n_active=n_active, discard_x=True
        )
        return self._matmul(quantized, scale, n_active, zero_point)
