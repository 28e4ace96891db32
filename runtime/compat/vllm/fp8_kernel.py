"""vLLM's FP8 linear layers: weights by channel or tensor, activations by token or static."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from vllm import envs
from vllm.model_executor.kernels.linear import (
    _POSSIBLE_FP8_KERNELS,
    CutlassFP8ScaledMMLinearKernel,
    FP8ScaledMMLinearLayerConfig,
)
from vllm.model_executor.layers.fusion.quant_activation import as_quantized_activation
from vllm.model_executor.layers.quantization.utils.quant_utils import (
    QuantKey,
    kFp8DynamicTokenSym,
    kFp8StaticTensorSym,
)
from vllm.model_executor.utils import replace_parameter

from ... import ops
from ...ops.linear.gemm_variants import GemmTiled
from ...ops.linear.precompile import layer_kernels
from .packed_layer import channel_scale, compile_ahead, hold_weight, rows_of, weight_of
from .support import Answer, runs_on
from .their_kernels import is_theirs, their_kernel

_E4M3 = torch.float8_e4m3fn
_ACTIVATIONS = (kFp8DynamicTokenSym, kFp8StaticTensorSym)


class OstinatoFP8LinearKernel(CutlassFP8ScaledMMLinearKernel):
    """FP8 by `ops.dynamic_w8a8_linear`, or a quantiser and `ops.w8a8_linear`.

    It is a subclass of vLLM's CUTLASS kernel, since vLLM knows the kernels whose rows do not depend
    on one another by their class (`fp8_scaled_mm_is_batch_invariant`). That holds here: under
    VLLM_BATCH_INVARIANT the ops are called with `batch_invariant`.
    """

    def __init__(self, c: FP8ScaledMMLinearLayerConfig, layer_param_names: Sequence[str]) -> None:
        super().__init__(c, layer_param_names)
        self.batch_invariant = bool(envs.VLLM_BATCH_INVARIANT)
        self.theirs: Any = None

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> Answer:
        return runs_on(GemmTiled, compute_capability)

    @classmethod
    def can_implement(cls, c: FP8ScaledMMLinearLayerConfig) -> Answer:
        if c.activation_quant_key not in _ACTIVATIONS:
            return False, f"has no activations of {c.activation_quant_key}"
        shape = c.weight_quant_key.scale.group_shape
        # ModelOpt and FBGEMM call a scale for each row of a weight one by token.
        by_row = shape.is_per_channel() or shape.is_per_token()
        if c.weight_quant_key.dtype != _E4M3 or not (shape.is_per_tensor() or by_row):
            return False, f"has no weights of {c.weight_quant_key}"
        return True, None

    def input_quant_key(self) -> QuantKey | None:
        """Return what activations may be quantised to before."""
        key: QuantKey | None = self.config.activation_quant_key
        return key if self.theirs is None else self.theirs.input_quant_key()

    def process_weights_after_loading(self, layer: Any) -> None:
        weight_name, scale_name, x_scale_name, _ = self.layer_param_names
        if is_theirs(layer, getattr(layer, weight_name)):
            names = self.layer_param_names
            self.theirs = their_kernel(self, layer, _POSSIBLE_FP8_KERNELS, "fp8_w8a8", names)
            return
        weight = getattr(layer, weight_name).data.t()  # vLLM has it as [K, N]
        widths = getattr(layer, "logical_widths", [weight.size(0)])
        replace_parameter(layer, scale_name, channel_scale(getattr(layer, scale_name), widths))
        x_scale = getattr(layer, x_scale_name, None)
        if x_scale is not None:
            replace_parameter(layer, x_scale_name, x_scale.detach().float().max().reshape(1))
        compile_ahead(
            weight,
            lambda device: layer_kernels(
                "per_token",
                tuple(weight.shape),
                _E4M3,
                self.config.input_dtype,
                out_dtype=self.config.out_dtype,
                batch_invariant=self.batch_invariant,
                device=device,
            ),
        )
        hold_weight(layer, weight_name, weight)

    def apply_weights(self, layer: Any, x: Any, bias: torch.Tensor | None = None) -> torch.Tensor:
        if self.theirs is not None:
            theirs: torch.Tensor = self.theirs.apply_weights(layer, x, bias)
            return theirs
        _, w_scale, x_scale, upper_bound = self._get_layer_params(layer)
        w = weight_of(layer, self.layer_param_names[0], self.config.weight_shape)
        given = as_quantized_activation(x, self.input_quant_key())
        if given is not None:
            codes, scales = given.data, given.scale
            shape, dtype = given.orig_shape, given.orig_dtype
        else:
            codes, scales = rows_of(x), None
            shape, dtype = x.shape, x.dtype
        dtype = dtype if self.config.out_dtype is None else self.config.out_dtype
        given_here = {"bias": bias, "out_dtype": dtype, "batch_invariant": self.batch_invariant}
        if scales is None and x_scale is None and upper_bound is None:
            out = ops.dynamic_w8a8_linear(codes, w, w_scale, **given_here)
        else:
            if scales is None and x_scale is not None:
                codes, scales = ops.quantize_per_tensor(codes, x_scale, _E4M3), x_scale
            elif scales is None:  # no op of ours has a bound for scales
                codes, scales = self.quant_fp8(codes, None, upper_bound)
            out = ops.w8a8_linear(rows_of(codes), w, scales.reshape(-1), w_scale, **given_here)
        return out.view(*shape[:-1], out.size(1))
