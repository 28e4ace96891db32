"""Linear layers as vLLM's own schemes make them, with weights that tests choose."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.activation import SiluAndMul

BF16 = torch.bfloat16
E4M3 = torch.float8_e4m3fn


def bare_layer(n_parts: list[int], k: int) -> Any:
    """Return a module with what vLLM's linear layers have before their weights are made."""
    layer: Any = nn.Module()
    layer.params_dtype, layer.prefix = BF16, "model.layers.0.mlp.down_proj"
    layer.input_size_per_partition, layer.output_partition_sizes = k, n_parts
    return layer


def create_weights(method: Any, layer: Any, **more: Any) -> None:
    """Let a scheme or method of vLLM make a layer's parameters."""
    k, parts = layer.input_size_per_partition, layer.output_partition_sizes
    method.create_weights(
        layer,
        output_partition_sizes=parts,
        input_size_per_partition=k,
        input_size=k,
        output_size=sum(parts),
        params_dtype=BF16,
        weight_loader=lambda *_: None,
        **more,
    )


def fill(parameter: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Write a checkpoint's values into a parameter, and return them."""
    parameter.data.copy_(values)
    return values


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the norm of the error over that of the expected tensor."""
    return float((got.float() - expected.float()).norm() / expected.float().norm())


def silu_and_mul() -> Any:
    """Return vLLM's gate, without the op of its binaries."""
    gate = SiluAndMul.__new__(SiluAndMul)
    nn.Module.__init__(gate)
    gate._forward_method = SiluAndMul.forward_native
    return gate
