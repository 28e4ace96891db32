"""Linear layers with FP8 weights in blocks of 128 by 128, and activations in groups of 128."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from .. import ops
from ..jit.variant import Variant
from ..ops.common.device import has_kernel
from ..ops.linear.block_scales import aligned_scales, scale_channels
from ..ops.linear.gemm_variants import GemmTiled
from ..ops.linear.precompile import block_kernels
from .kinds import Activation, InputKind
from .layers import Linear, require_no_bias
from .norms import Addend, Norm


@dataclass
class BlockFP8Linear(Linear):
    """y = Σ over groups of 128 of K of s_x·s_w·(q_x·Wᵀ), + b, with everything in e4m3.

    `weight` [N, K] float8_e4m3fn, packed for GPUs with GEMM kernels: a plain one is packed here.
    `weight_scale` is fp32, made by `ops.channel_scales`; `bias` [N] in `out_dtype`. All tensors are
    constants from then on (see `ops.fp8_block_linear`). Activations are quantised by groups at run
    time, with `power_of_two` by scales that are such.

    `batch_invariant` keeps a token's bits from depending on the other tokens of the call.
    """

    weight: torch.Tensor | ops.PackedWeight
    weight_scale: torch.Tensor
    out_dtype: torch.dtype
    bias: torch.Tensor | None = None
    power_of_two: bool = False
    batch_invariant: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.weight, torch.Tensor) and has_kernel(GemmTiled, self.weight):
            self.weight = ops.pack_weight(self.weight)
        self.weight_scale = aligned_scales(self.weight_scale)

    @property
    def shape(self) -> tuple[int, int]:
        return self.weight.shape[0], self.weight.shape[1]

    @property
    def weight_dtype(self) -> torch.dtype:
        return self.weight.dtype

    def kernels(self, kind: InputKind, dtype: torch.dtype) -> list[Variant]:
        """Return the kernels that quantise x and multiply it, for any number of rows."""
        device = self.weight_scale.device
        return block_kernels(
            kind,
            self.shape,
            dtype,
            out_dtype=self.out_dtype,
            batch_invariant=self.batch_invariant,
            device=device if device.type == "cuda" else None,
            scale_channels=(scale_channels(self.weight_scale, self.shape[0]),),
        )

    def __call__(self, x: torch.Tensor, n_active: torch.Tensor | None = None) -> torch.Tensor:
        """Map x [M, K] (16- or 32-bit) to [M, N] in `out_dtype`."""
        quantized, scale = ops.quantize_per_group(
            x, power_of_two=self.power_of_two, n_active=n_active
        )
        return self._matmul(quantized, scale, n_active)

    def after_norm(
        self,
        x: Addend,
        residual: torch.Tensor | None,
        norm: Norm,
        n_active: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        quantized, scale, total = norm.quantize_per_group(
            x, residual, power_of_two=self.power_of_two, n_active=n_active
        )
        return self._matmul(quantized, scale, n_active), total

    def after_activation(
        self, x: torch.Tensor, kind: Activation, n_active: torch.Tensor | None = None
    ) -> torch.Tensor:
        quantized, scale = ops.activation_quantize_per_group(
            x, kind, power_of_two=self.power_of_two, n_active=n_active, discard_x=True
        )
        return self._matmul(quantized, scale, n_active)

    def scaled(self, norm: Norm, factor: float) -> tuple[Linear, Norm]:
        require_no_bias(self.bias)
        return replace(self, weight_scale=self.weight_scale * factor), norm

    def _matmul(
        self, quantized: torch.Tensor, scale: torch.Tensor, n_active: torch.Tensor | None
    ) -> torch.Tensor:
        return ops.fp8_block_linear(
            quantized,
            self.weight,
            scale,
            self.weight_scale,
            bias=self.bias,
            n_active=n_active,
            out_dtype=self.out_dtype,
            batch_invariant=self.batch_invariant,
        )
