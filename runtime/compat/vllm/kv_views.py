"""A layer's KV cache as vLLM allocates it, seen as our ops take it. Nothing is copied.

vLLM's view is [blocks, heads_kv, block_size, content] with any strides; content of a token and head
is [key | value], in 16 bits or e4m3. With scales by token and head it is
[key | value | key scale | value scale | 8 bytes of padding], which keeps rows aligned to 16 bytes,
as the kernels read them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from vllm.v1.kv_cache_interface import KVQuantMode, get_kv_quant_mode

_SCALE_BYTES = 16  # two fp32 scales and their padding

# What an 8-bit cache holds.
CACHE_DTYPES = {
    KVQuantMode.FP8_PER_TENSOR: torch.float8_e4m3fn,
    KVQuantMode.FP8_PER_TOKEN_HEAD: torch.float8_e4m3fn,
    KVQuantMode.INT8_PER_TOKEN_HEAD: torch.int8,
}
_BY_TOKEN = (KVQuantMode.INT8_PER_TOKEN_HEAD, KVQuantMode.FP8_PER_TOKEN_HEAD)


class KVViews(NamedTuple):
    """Caches [blocks, block_size, heads_kv, dim] and what their elements are multiplied by.

    Scales are None in 16 bits, scalars, or [blocks, block_size, heads_kv].
    """

    k: torch.Tensor
    v: torch.Tensor
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None


def packed_spec(spec: Any) -> Any:
    """Return vLLM's spec of a layer's cache with room for scales by token and head, if it has them.

    Raises:
        ValueError: when keys and values differ in their dim.
    """
    if spec.head_size_v != spec.head_size:
        raise ValueError(
            f"head_size_v: got {spec.head_size_v}, expected head_size = {spec.head_size}"
        )
    if spec.kv_quant_mode not in _BY_TOKEN or spec.state_content_bytes is not None:
        return spec
    return replace(spec, state_content_bytes=2 * spec.head_size + _SCALE_BYTES)


def kv_views(
    kv_cache: torch.Tensor,
    kv_cache_dtype: str,
    head_size: int,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
) -> KVViews:
    """Return a layer's cache as our ops take it.

    Args:
        kv_cache: [blocks, heads_kv, block_size, content], of vLLM.
        kv_cache_dtype: the name that vLLM has for what the cache holds.
        head_size: of keys and of values.
        k_scale: fp32 scalar of a layer; of a cache in e4m3 with one scale.
        v_scale: likewise.

    Raises:
        ValueError: for a content that is not as above.
    """
    mode = get_kv_quant_mode(kv_cache_dtype)
    size = kv_cache.element_size()
    expected = 2 * head_size * size + (_SCALE_BYTES if mode in _BY_TOKEN else 0)
    if kv_cache.size(3) * size != expected:
        raise ValueError(
            f"kv_cache: got {kv_cache.size(3) * size} bytes of a token and head, "
            f"expected {expected} for {kv_cache_dtype} and head_size = {head_size}"
        )
    slots = kv_cache.transpose(1, 2)
    k, v = slots[..., :head_size], slots[..., head_size : 2 * head_size]
    if mode == KVQuantMode.NONE:
        return KVViews(k, v, None, None)
    dtype = CACHE_DTYPES[mode]
    k, v = k.view(dtype), v.view(dtype)
    if mode not in _BY_TOKEN:
        return KVViews(k, v, k_scale, v_scale)
    scales = slots[..., 2 * head_size : 2 * head_size + 8].view(torch.float32)
    return KVViews(k, v, scales[..., 0], scales[..., 1])
