"""Caches and batches as vLLM lays them out, and naive attention to compare with."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from vllm.config import DeviceConfig, VllmConfig
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheLayout,
    compute_layer_kv_cache_shape_bytes,
    get_kv_quant_mode,
)

from ostinato.compat.vllm.attention_backend import OstinatoAttentionBackend

BF16 = torch.bfloat16
HEADS, HEADS_KV, DIM, BLOCK = 4, 2, 64, 16
STORED = {"int8_per_token_head": torch.int8, "auto": BF16}
CACHES = ("auto", "fp8", "int8_per_token_head", "fp8_per_token_head")
LAYOUTS = (KVCacheLayout.LBNHC, KVCacheLayout.LBHNC)


def spec_of(kv_cache_dtype: str, dim: int = DIM) -> Any:
    """Return the spec of a layer's cache, as the backend customises it."""
    spec = FullAttentionSpec(
        block_size=BLOCK,
        num_kv_heads=HEADS_KV,
        head_size=dim,
        dtype=STORED.get(kv_cache_dtype, torch.uint8),
        kv_quant_mode=get_kv_quant_mode(kv_cache_dtype),
    )
    return OstinatoAttentionBackend.customize_spec(spec)


def empty_cache(
    kv_cache_dtype: str, layout: KVCacheLayout, blocks: int, device: torch.device, dim: int = DIM
) -> torch.Tensor:
    """Return a layer's cache of bytes that mean nothing."""
    return cache_of(spec_of(kv_cache_dtype, dim), layout, blocks, device)


def cache_of(spec: Any, layout: KVCacheLayout, blocks: int, device: torch.device) -> torch.Tensor:
    """Return a cache [blocks, heads, block_size, content] of a spec, of random bytes."""
    shape = compute_layer_kv_cache_shape_bytes(spec, blocks)
    order = layout.layer_view_order
    physical = torch.randint(0, 256, [shape[i] for i in order], dtype=torch.uint8, device=device)
    logical = physical.permute([order.index(i) for i in range(4)])
    return logical.view(spec.dtype)


def layer_of(cache: torch.Tensor) -> Any:
    """Return what an implementation asks of vLLM's layer."""
    scales = (torch.tensor(s, device=cache.device) for s in (0.05, 0.04))
    return SimpleNamespace(**dict(zip(("_k_scale", "_v_scale"), scales, strict=True)))


def config_of(device: torch.device, *, sequences: int = 8) -> VllmConfig:
    """Return a config with what a builder of metadata asks for."""
    config = VllmConfig(device_config=DeviceConfig(device=device.type))
    config.scheduler_config.max_num_seqs = sequences
    config.model_config = SimpleNamespace(
        dtype=BF16, get_num_attention_heads=lambda _: HEADS, max_model_len=256
    )
    return config


def common_of(
    q_lens: Sequence[int],
    k_lens: Sequence[int],
    table: torch.Tensor,
    *,
    tokens: int | None = None,
    **more: Any,
) -> CommonAttentionMetadata:
    """Return vLLM's metadata of a batch; `tokens` counts padding, too."""
    device = table.device
    starts = torch.tensor([0, *q_lens], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    slots = []
    for b, (queries, keys) in enumerate(zip(q_lens, k_lens, strict=True)):
        for at in range(keys - queries, keys):
            slots.append(int(table[b, at // BLOCK]) * BLOCK + at % BLOCK)
    total = len(slots) if tokens is None else tokens
    slots += [-1] * (total - len(slots))
    return CommonAttentionMetadata(
        query_start_loc=starts.to(device),
        query_start_loc_cpu=starts,
        seq_lens=torch.tensor(k_lens, dtype=torch.int32, device=device),
        num_reqs=len(q_lens),
        num_actual_tokens=total,
        max_query_len=max(q_lens),
        max_seq_len=max(k_lens),
        block_table_tensor=table,
        slot_mapping=torch.tensor(slots, dtype=torch.int64, device=device),
        **more,
    )


def naive_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    window: int | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend with the last queries [Lq, heads, dim] of a sequence to its keys and values."""
    group = q.size(1) // k.size(1)
    keys, values = (x.double().repeat_interleave(group, 1) for x in (k, v))
    logits = torch.einsum("qhd,khd->hqk", q.double(), keys) * q.size(2) ** -0.5
    if softcap:
        logits = softcap * (logits / softcap).tanh()
    at_key = torch.arange(k.size(0), device=q.device)
    at_query = torch.arange(k.size(0) - q.size(0), k.size(0), device=q.device).unsqueeze(1)
    seen = at_key <= at_query
    if window is not None:
        seen &= at_key > at_query - window
    logits = logits.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        column = sinks.double().view(-1, 1, 1).expand(-1, q.size(0), 1)
        logits = torch.cat([logits, column], 2)
    weights = logits.softmax(2)[..., : k.size(0)]
    return torch.einsum("hqk,khd->qhd", weights, values)
