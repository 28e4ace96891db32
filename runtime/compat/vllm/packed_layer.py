"""Weights of vLLM's linear layers in the layout of our kernels, held once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from vllm.model_executor.utils import replace_parameter

from ...ops import PackedWeight, pack_weight
from ...ops.linear.precompile import Variant, precompile

# vLLM's MLA attention reads this layer's weight itself, not through its linear method.
_READ_BY_MLA = "kv_b_proj"


def hold_weight(layer: Any, name: str, weight: torch.Tensor) -> None:
    """Let the parameter `name` of a layer hold `weight` [N, K] as our kernels read it.

    The weight is packed, and its memory in rows is freed with the parameter's old data. That of a
    layer which MLA attention reads stays what it is.
    """
    layer.ostinato_shape = tuple(weight.shape)
    if not getattr(layer, "prefix", "").endswith(_READ_BY_MLA):
        replace_parameter(layer, name, pack_weight(weight).data)


def compile_ahead(weight: torch.Tensor, kernels: Callable[[torch.device], list[Variant]]) -> None:
    """Compile what a layer with a weight on a GPU may launch, since a capture compiles nothing."""
    if weight.is_cuda:
        precompile(kernels(weight.device), weight.device)


def weight_of(
    layer: Any, name: str, shape: tuple[int, int] | None = None
) -> torch.Tensor | PackedWeight:
    """Return the weight [N, K] that `hold_weight` left in a layer.

    Args:
        layer: of vLLM.
        name: of the parameter.
        shape: the weight's, where `hold_weight` may have run in another process, whose parameters
            this one has (`--load-format ipc_cache`).

    Raises:
        RuntimeError: where it has run in none.
    """
    data: torch.Tensor = getattr(layer, name)
    found: tuple[int, int] | None = getattr(layer, "ostinato_shape", shape)
    if found is None:
        raise RuntimeError(
            f"{name}: got one that vLLM has not prepared after loading it, as with --load-format "
            "tensorizer, expected another load format for this plug-in"
        )
    n, k = found
    if data.dim() == 4:
        return PackedWeight(data, n, k)
    # FP8 weights are [K, N] to vLLM, whose columns are contiguous.
    return data if data.shape == (n, k) and data.stride(1) == 1 else data.t()


def is_held(layer: Any) -> bool:
    """Return whether one of our kernels holds the weight of a layer."""
    return hasattr(layer, "ostinato_shape")


def channel_scale(scale: torch.Tensor, widths: list[int]) -> torch.Tensor:
    """Return the fp32 scales of a weight as ops take them: [N], or [1] for all channels.

    Args:
        scale: [N, 1] or [N] by channel, or one for each of the weights that a layer is made of.
        widths: output channels of each of these.
    """
    scale = scale.detach().float().reshape(-1)
    if scale.numel() in (1, sum(widths)):
        return scale.contiguous()
    if scale.numel() != len(widths):
        raise ValueError(
            f"scale: got {scale.numel()} elements, expected 1, {len(widths)} or {sum(widths)}"
        )
    return scale.repeat_interleave(torch.tensor(widths, device=scale.device))


def rows_of(x: torch.Tensor) -> torch.Tensor:
    """Return activations [..., K] as [M, K]."""
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
