"""vLLM's own kernel, for layers that ours would serve worse or not at all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from vllm.model_executor.kernels.linear import (
    FP8ScaledMMLinearKernel,
    Int8ScaledMMLinearKernel,
    choose_scaled_mm_linear_kernel,
)
from vllm.platforms import PlatformEnum

_TAKES_NAMES = (FP8ScaledMMLinearKernel, Int8ScaledMMLinearKernel)


def is_theirs(layer: Any, weight: torch.Tensor) -> bool:
    """Return whether vLLM should serve a layer.

    That is one whose weight lies in the host's memory (`--cpu-offload-gb`), from where packing
    would take it, and one whose weight vLLM multiplies itself (`is_bmm`, of DeepSeek V4).
    """
    offloaded = getattr(weight, "_vllm_is_uva_offloaded", False)
    return bool(offloaded or getattr(layer, "is_bmm", False))


def their_kernel(
    ours: Any,
    layer: Any,
    table: Mapping[PlatformEnum, Sequence[type[Any]]],
    quantization: str,
    names: Sequence[str] = ("weight", "weight_scale", "input_scale", "input_scale_ub"),
) -> Any:
    """Return the kernel that vLLM takes without ours, once it has processed a layer's weights.

    Args:
        ours: the layer's kernel, with its `config`.
        layer: whose weights are loaded.
        table: of vLLM, from which it was chosen.
        quantization: what vLLM calls the table's, such as "int8_w8a8".
        names: of the layer's parameters.
    """
    others = {
        platform: [kernel for kernel in kernels if kernel is not type(ours)]
        for platform, kernels in table.items()
    }
    kind = choose_scaled_mm_linear_kernel(ours.config, others, quantization=quantization)
    if issubclass(kind, _TAKES_NAMES):
        kernel = kind(ours.config, layer_param_names=list(names))
    else:
        kernel = kind(ours.config)
    kernel.process_weights_after_loading(layer)
    layer._input_quant_key = kernel.input_quant_key()  # not ours, which vLLM may have put there
    return kernel
