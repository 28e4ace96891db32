"""vLLM's FP8 linear layers whose weights have a scale for each block of 128 by 128."""

from __future__ import annotations

from typing import Any

import torch
from vllm import envs
from vllm.model_executor.kernels.linear import (
    _POSSIBLE_FP8_BLOCK_KERNELS,
    Fp8BlockScaledMMLinearKernel,
    FP8ScaledMMLinearLayerConfig,
)
from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape
from vllm.model_executor.utils import replace_parameter

from ... import ops
from ...ops.linear.block_scales import scale_channels
from ...ops.linear.gemm_variants import GemmTiled
from ...ops.linear.precompile import block_kernels
from .packed_layer import compile_ahead, hold_weight, rows_of, weight_of
from .support import Answer, runs_on
from .their_kernels import is_theirs, their_kernel


class OstinatoFp8BlockLinearKernel(Fp8BlockScaledMMLinearKernel):
    """FP8 by blocks: `ops.quantize_per_group` and `ops.fp8_block_linear`."""

    def __init__(self, config: FP8ScaledMMLinearLayerConfig) -> None:
        super().__init__(config)
        self.batch_invariant = bool(envs.VLLM_BATCH_INVARIANT)
        self.theirs: Any = None

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> Answer:
        return runs_on(GemmTiled, compute_capability)

    @classmethod
    def can_implement(cls, config: FP8ScaledMMLinearLayerConfig) -> Answer:
        able, reason = super().can_implement(config)
        if not able:
            return able, reason
        activations = config.activation_quant_key.scale.group_shape
        weights = config.weight_quant_key.scale.group_shape
        if activations != GroupShape(1, 128) or weights != GroupShape(128, 128):
            return False, f"has no groups of {activations} with blocks of {weights}"
        return True, None

    def process_weights_after_loading(self, layer: Any) -> None:
        params = self._get_layer_params(layer)
        if is_theirs(layer, params.weight):
            self.theirs = their_kernel(self, layer, _POSSIBLE_FP8_BLOCK_KERNELS, "fp8_block_w8a8")
            return
        weight = params.weight.data
        scales = ops.channel_scales([(params.block_scale.data.float(), slice(0, weight.size(0)))])
        # A parameter: what graphs read keeps its place when vLLM loads weights again.
        replace_parameter(layer, "ostinato_scales", scales)
        compile_ahead(
            weight,
            lambda device: block_kernels(
                "per_token",
                tuple(weight.shape),
                self.config.input_dtype,
                out_dtype=self.config.out_dtype,
                batch_invariant=self.batch_invariant,
                device=device,
                scale_channels=(scale_channels(scales, weight.size(0)),),
            ),
        )
        hold_weight(layer, params.WEIGHT, weight)

    def apply_weights(
        self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None, **kwargs: Any
    ) -> torch.Tensor:
        if self.theirs is not None:
            theirs: torch.Tensor = self.theirs.apply_weights(layer, x, bias, **kwargs)
            return theirs
        codes, scales = ops.quantize_per_group(rows_of(x))
        w = weight_of(layer, "weight", self.config.weight_shape)
        out = self.apply_block_scaled_mm(codes, w, scales, layer.ostinato_scales, bias)
        return out.view(*x.shape[:-1], out.size(1))

    def apply_block_scaled_mm(
        self,
        A: torch.Tensor,
        B: torch.Tensor | ops.PackedWeight,
        As: torch.Tensor,
        Bs: torch.Tensor,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Multiply codes A [M, K] by a weight B [N, K]; scales are as of `ops.fp8_block_linear`."""
        how = {"out_dtype": self.config.out_dtype, "batch_invariant": self.batch_invariant}
        return ops.fp8_block_linear(A, B, As, Bs, bias=bias, **how)
