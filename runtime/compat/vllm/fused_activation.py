"""SiLU·mul together with the quantisation for the layer behind it, in one launch.

Models of vLLM ask `maybe_fused_act_quant` for their gate; it looks for a producer of what the next
layer's kernel takes. These are such producers, for layers that our kernels hold.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.fusion import fused_act_quant
from vllm.model_executor.layers.fusion.quant_activation import QuantizedActivation
from vllm.model_executor.layers.quantization.utils.quant_utils import (
    QuantKey,
    kFp8DynamicTokenSym,
    kInt8DynamicTokenSym,
)

from ... import ops
from .packed_layer import is_held, rows_of

_DTYPES = {kInt8DynamicTokenSym: torch.int8, kFp8DynamicTokenSym: torch.float8_e4m3fn}


def register() -> None:
    """Add the producers to vLLM's table; its own stay as they are."""
    for key, dtype in _DTYPES.items():
        entry = (SiluAndMul, key)
        fused_act_quant._FUSED_ACT_QUANT[entry] = _Producer(key, dtype)
        fused_act_quant._FUSED_ACT_QUANT_SUPPORT[entry] = _is_for_us


def _is_for_us(act_fn: Any, x: torch.Tensor, linear: Any) -> bool:
    # Some checkpoints of compressed-tensors rotate a layer's input, and take it in 16 bits.
    transform = getattr(getattr(linear, "quant_method", None), "input_transform", None)
    return is_held(linear) and transform is None


class _Producer:
    """SiLU·mul of x [..., 2·K] to codes and scales by token."""

    def __init__(self, key: QuantKey, dtype: torch.dtype) -> None:
        self.key = key
        self.dtype = dtype

    def __call__(self, x: torch.Tensor, linear: Any) -> QuantizedActivation:
        shape = torch.Size((*x.shape[:-1], x.shape[-1] // 2))
        codes, scale = ops.silu_mul_quantize(rows_of(x), self.dtype)
        return QuantizedActivation(
            data=codes.view(shape),
            scale=scale.view(*shape[:-1], 1),
            orig_dtype=x.dtype,
            orig_shape=shape,
            quant_key=self.key,
        )
