"""vLLM's INT8 linear layers: weights by channel or tensor, activations by token or static."""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.kernels.linear import (
    _POSSIBLE_INT8_KERNELS,
    Int8ScaledMMLinearKernel,
    Int8ScaledMMLinearLayerConfig,
)
from vllm.model_executor.layers.fusion.quant_activation import as_quantized_activation
from vllm.model_executor.layers.quantization.utils.quant_utils import (
    QuantKey,
    kInt8DynamicTokenSym,
)
from vllm.model_executor.utils import replace_parameter

from ... import ops
from ...ops.linear.gemm_variants import GemmTiled
from ...ops.linear.packed_weight import channel_sums
from ...ops.linear.precompile import layer_kernels
from .packed_layer import channel_scale, compile_ahead, hold_weight, rows_of, weight_of
from .support import Answer, runs_on
from .their_kernels import is_theirs, their_kernel


class OstinatoInt8LinearKernel(Int8ScaledMMLinearKernel):
    """INT8 by `ops.dynamic_w8a8_linear`, or a quantiser and `ops.w8a8_linear`.

    Asymmetric activations by token include 0 in their range, as compressed-tensors has it.
    """

    theirs: Any = None

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> Answer:
        return runs_on(GemmTiled, compute_capability)

    @classmethod
    def can_implement(cls, c: Int8ScaledMMLinearLayerConfig) -> Answer:
        return True, None

    def input_quant_key(self) -> QuantKey | None:
        """Return what activations may be quantised to before: by token, symmetrically."""
        if self.config.is_static_input_scheme or not self.config.input_symmetric:
            return None
        return kInt8DynamicTokenSym

    def process_weights_after_loading(self, layer: Any) -> None:
        weight_name, scale_name, x_scale_name, zero_name, sums_name = self.layer_param_names
        if is_theirs(layer, getattr(layer, weight_name)):
            names = self.layer_param_names
            self.theirs = their_kernel(self, layer, _POSSIBLE_INT8_KERNELS, "int8_w8a8", names)
            return
        weight = getattr(layer, weight_name).data
        scale = channel_scale(getattr(layer, scale_name), layer.logical_widths)
        replace_parameter(layer, scale_name, scale)
        if self.config.is_static_input_scheme:
            x_scale, zero_point = _one_range(
                getattr(layer, x_scale_name),
                None if self.config.input_symmetric else getattr(layer, zero_name),
            )
            replace_parameter(layer, x_scale_name, x_scale)
            replace_parameter(layer, zero_name, zero_point)
        if not self.config.input_symmetric:
            replace_parameter(layer, sums_name, channel_sums(weight, weight.size(0)))
        key = self.input_quant_key()
        if key is not None:  # vLLM's scheme of INT8 layers does not say it
            layer._input_quant_key = key
        compile_ahead(
            weight,
            lambda device: layer_kernels(
                "per_token",
                tuple(weight.shape),
                torch.int8,
                layer.params_dtype,
                asymmetric=not self.config.input_symmetric
                and not self.config.is_static_input_scheme,
                device=device,
            ),
        )
        hold_weight(layer, weight_name, weight)

    def apply_weights(self, layer: Any, x: Any, bias: torch.Tensor | None = None) -> torch.Tensor:
        if self.theirs is not None:
            theirs: torch.Tensor = self.theirs.apply_weights(layer, x, bias)
            return theirs
        _, w_scale, x_scale, zero_point, sums = self._get_layer_params(layer)
        w = weight_of(layer, self.layer_param_names[0])
        given = as_quantized_activation(x, self.input_quant_key())
        if given is not None:
            codes, scales = rows_of(given.data), given.scale.reshape(-1)
            shape, dtype = given.orig_shape, given.orig_dtype
            zeros = None
        else:
            shape, dtype = x.shape, x.dtype
            rows = rows_of(x)
            if sums is None and x_scale is None:
                out = ops.dynamic_w8a8_linear(rows, w, w_scale, bias=bias, out_dtype=dtype)
                return out.view(*shape[:-1], out.size(1))
            if x_scale is None:
                codes, scales, zeros = ops.quantize_asymmetric(rows)
            else:
                codes = ops.quantize_per_tensor(rows, x_scale, torch.int8, zero_point=zero_point)
                scales, zeros = x_scale, zero_point
        out = ops.w8a8_linear(
            codes,
            w,
            scales,
            w_scale,
            bias=bias,
            x_zero_point=zeros,
            w_sum=sums,
            out_dtype=dtype,
        )
        return out.view(*shape[:-1], out.size(1))


def _one_range(
    scale: torch.Tensor, zero_point: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return one scale [1], and zero point [1] int32, whose range has those of all parts."""
    scale = scale.detach().float().reshape(-1)
    if zero_point is None:
        return scale.max().reshape(1), None
    zeros = zero_point.detach().to(torch.int32).reshape(-1)
    if scale.numel() == 1:
        return scale, zeros
    high, low = (scale * (127 - zeros)).max(), (scale * (-128 - zeros)).min()
    joint = (high - low) / 255
    return joint.reshape(1), (-128 - low / joint).round().to(torch.int32).reshape(1)
