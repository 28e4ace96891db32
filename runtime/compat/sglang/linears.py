"""W8A8 products of SGLang's linear methods on our kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import torch
from sglang.srt.environ import envs
from sglang.srt.runtime_context import get_parallel
from sglang.srt.utils.offloader import NoopOffloader, get_offloader

from ... import ops
from ...checkpoint.scales import merge_asymmetric
from ...models.asymmetric_linear import AsymmetricLinear
from ...models.block_linear import BlockFP8Linear
from ...models.layers import W8A8Linear
from ...ops.common.device import has_kernel
from ...ops.linear.gemm_variants import GemmTiled

_QUANTIZATION = "sglang.srt.layers.quantization"
_SCHEMES = f"{_QUANTIZATION}.compressed_tensors.schemes"
_LOADER = "sglang.srt.model_loader.loader"
_ATTRIBUTE = "ostinato_linear"  # of a layer of SGLang: its product
_BLOCK = [128, 128]
_KEPT = (
    "8-bit linear layers hold them in the order of ostinato's kernels; start the server with "
    "SGLANG_PLUGINS=none, or anew"
)

Product = W8A8Linear | BlockFP8Linear

_read_later: ContextVar[bool] = ContextVar("_read_later", default=False)


def hook_methods(registry: Any, around: Any) -> None:
    """Have SGLang's linear methods prepare and apply our products.

    Args:
        registry: SGLang's HookRegistry.
        around: the type of hook that may call what it is registered for.
    """
    for path, apply, product_of in (
        (f"{_QUANTIZATION}.w8a8_int8.W8A8Int8LinearMethod", "apply", _per_channel),
        (f"{_QUANTIZATION}.w8a8_fp8.W8A8Fp8LinearMethod", "apply", _per_channel),
        (f"{_QUANTIZATION}.fp8.Fp8LinearMethod", "apply", _of_fp8),
        (
            f"{_SCHEMES}.compressed_tensors_w8a8_int8.CompressedTensorsW8A8Int8",
            "apply_weights",
            _of_compressed_tensors,
        ),
        (
            f"{_SCHEMES}.compressed_tensors_w8a8_fp8.CompressedTensorsW8A8Fp8",
            "apply_weights",
            _of_compressed_tensors,
        ),
    ):
        prepare = f"{path}.process_weights_after_loading"
        registry.register(prepare, _Prepare(product_of), around)
        registry.register(f"{path}.{apply}", _apply, around)
    for loader in ("ShardedStateLoader.load_model", "RemoteModelLoader._load_model_from_remote_kv"):
        registry.register(f"{_LOADER}.{loader}", _leave_to_sglang, around)


def _leave_to_sglang(original: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Call a loader of what SGLang has saved, which prepares layers before it reads weights."""
    token = _read_later.set(True)
    try:
        return original(*arguments, **options)
    finally:
        _read_later.reset(token)


class _Prepare:
    """Makes a product of a layer's loaded weights, which the layer gives up then.

    Args:
        product_of: returns the product of a method and a layer; None leaves the layer to SGLang.
    """

    def __init__(self, product_of: Callable[[Any, Any], Product | None]) -> None:
        self._product_of = product_of

    def __call__(self, original: Callable[..., Any], method: Any, layer: Any) -> Any:
        if hasattr(layer, _ATTRIBUTE):
            raise RuntimeError(f"weights: got others for a running server, {_KEPT}")
        if not _is_ours(layer) or (product := self._product_of(method, layer)) is None:
            return original(method, layer)
        # Held once: SGLang's own copy goes.
        for name in ("weight", "weight_scale", "weight_scale_inv", "input_scale"):
            if name in layer._parameters:
                setattr(layer, name, None)
        setattr(layer, _ATTRIBUTE, product)
        # By this name SGLang refuses requests to exchange weights, before it changes any.
        layer._derived_weight_cache_error = f"Weights can not be exchanged: {_KEPT}"
        # And by this one to save them, or to send them to another server.
        layer._weight_export_error = f"Weights can not be exported: {_KEPT}"
        return None


def _apply(
    original: Callable[..., Any],
    method: Any,
    layer: Any,
    x: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return x [..., K] times the layer's weight, plus a bias [N], by our product if it has one."""
    product: Product | None = getattr(layer, _ATTRIBUTE, None)
    if product is None:
        result: torch.Tensor = original(method, layer, x, bias)
        return result
    if not isinstance(x, torch.Tensor):
        raise TypeError(
            f"x: got {type(x).__name__}, activations that are quantised already, expected a tensor"
        )
    if product.bias is not bias:  # once: SGLang gives the same one in each call
        product = replace(product, bias=bias)
        setattr(layer, _ATTRIBUTE, product)
    return product(x.reshape(-1, x.size(-1))).view(*x.shape[:-1], -1)


def _is_ours(layer: Any) -> bool:
    """Return whether a layer is one that kernels of ours may serve.

    SGLang reads some weights itself: that of `kv_b_proj`, to absorb it into attention; those of
    experts shared by all tokens, to quantise what enters these and the others once; and of queries'
    projections that ranks of a context exchange. It moves weights that it offloads to the host by
    what it knows of them.
    """
    weight, prefix = layer.weight, getattr(layer, "prefix", "")
    if not has_kernel(GemmTiled, weight) or not isinstance(get_offloader(), NoopOffloader):
        return False
    if _read_later.get() or weight.itemsize != 1 or "kv_b_proj" in prefix:
        return False
    if "shared_experts" in prefix and envs.SGLANG_OPT_MOE_QUANT_ONCE.get():
        return False
    return not (prefix.endswith(("q_b_proj", ".q_proj")) and _are_queries_exchanged())


def _are_queries_exchanged() -> bool:
    """Return whether ranks of a context gather projections of queries (--dcp-replicate-q-proj)."""
    parallel = get_parallel()
    return bool(parallel.dcp_enabled and parallel.dcp_replicate_q_proj)


def _per_channel(method: Any, layer: Any) -> Product | None:
    """Return the product of a method of dynamic INT8 or FP8 with a scale per channel."""
    return _w8a8(layer, layer.weight_scale, static=False, symmetric=True)


def _of_compressed_tensors(scheme: Any, layer: Any) -> Product | None:
    """Return the product of a scheme of compressed-tensors."""
    if getattr(scheme, "weight_block_size", None) is not None:
        return _blocks(layer, scheme.weight_block_size, layer.weight_scale, power_of_two=False)
    symmetric = getattr(scheme, "input_symmetric", True)
    return _w8a8(layer, layer.weight_scale, scheme.is_static_input_scheme, symmetric)


def _of_fp8(method: Any, layer: Any) -> Product | None:
    """Return the product of a layer of SGLang's method fp8, per tensor or in blocks."""
    if method.use_marlin or method.use_mxfp8 or not method.is_checkpoint_fp8_serialized:
        return None
    if method.block_quant:
        if getattr(layer, "keep_plain_weight_layout", False):  # the model reads it
            return None
        power_of_two = getattr(method.quant_config, "scale_fmt", None) == "ue8m0"
        return _blocks(layer, method.weight_block_size, layer.weight_scale_inv, power_of_two)
    static = layer.input_scale is not None
    return _w8a8(layer, layer.weight_scale, static, symmetric=True)


def _w8a8(
    layer: Any, scale: torch.Tensor, static: bool, symmetric: bool
) -> W8A8Linear | AsymmetricLinear:
    """Return a product with a scale per channel or tensor.

    Args:
        layer: of SGLang, with `weight` [N, K].
        scale: [N, 1] or [N]; or one of each of the layer's `logical_widths`, which it joins.
        static: whether `input_scale` quantises activations, else each token has a scale.
        symmetric: whether activations have no zero point.
    """
    weight = layer.weight.data
    input_scale = zero_point = None
    if static:
        input_scale = layer.input_scale.data.float().reshape(-1)
        if symmetric:
            input_scale = input_scale.max()
        else:
            zeros = layer.input_zero_point.data.to(torch.int32).reshape(-1)
            input_scale, zero_point = merge_asymmetric(input_scale, zeros.expand_as(input_scale))
    kind = W8A8Linear if static or symmetric else AsymmetricLinear
    return kind(
        weight=weight,
        weight_scale=_row_scales(scale.data.float(), weight.size(0), layer),
        out_dtype=layer.params_dtype,
        input_scale=input_scale,
        input_zero_point=zero_point,
        weight_sum=None if zero_point is None else weight.sum(1, dtype=torch.int32),
    )


def _row_scales(scale: torch.Tensor, rows: int, layer: Any) -> torch.Tensor:
    """Return a scale for each row, [rows] fp32."""
    if scale.numel() == rows:
        return scale.reshape(rows).contiguous()
    widths: Sequence[int] = layer.logical_widths
    if scale.numel() != len(widths) or sum(widths) != rows:
        raise ValueError(
            f"weight_scale: got {list(scale.shape)} for weights of {list(widths)} rows, expected "
            "one scale for each of them, or one for each row"
        )
    counts = torch.tensor(widths, device=scale.device)
    return scale.reshape(-1).repeat_interleave(counts)


def _blocks(
    layer: Any, block: Sequence[int], scale: torch.Tensor, power_of_two: bool
) -> BlockFP8Linear | None:
    """Return a product with a scale for each block of 128 by 128, None for other blocks.

    Args:
        layer: of SGLang, with `weight` [N, K].
        block: its shape.
        scale: [ceil(N / 128), ceil(K / 128)].
        power_of_two: whether scales of activations are such.
    """
    if list(block) != _BLOCK:
        return None
    weight = layer.weight.data
    return BlockFP8Linear(
        weight=weight,
        weight_scale=ops.channel_scales([(scale.data, slice(0, weight.size(0)))]),
        out_dtype=layer.params_dtype,
        power_of_two=power_of_two,
    )
