"""The attention of one layer of vLLM: writing its cache, and attending to it."""

from __future__ import annotations

from typing import Any

import torch
from vllm import envs
from vllm.v1.attention.backend import AttentionImpl, AttentionType

from ... import ops
from .attention_metadata import OstinatoMetadata
from .kv_views import KVViews, kv_views
from .rotary import fp32_angles


class OstinatoAttentionImpl(AttentionImpl):
    """Attention by `ops.paged_attention` to a cache that `ops.append_kv` writes."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        if alibi_slopes is not None:
            raise ValueError("alibi_slopes: got a list, expected None")
        if attn_type != AttentionType.DECODER:
            raise ValueError(f"attn_type: got {attn_type!r}, expected 'decoder'")
        if sinks is not None and sinks.shape != (num_heads,):
            raise ValueError(f"sinks: got shape {list(sinks.shape)}, expected [{num_heads}]")
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.window = None if sliding_window is None else (sliding_window - 1, 0)
        self.kv_cache_dtype = kv_cache_dtype
        self.softcap = logits_soft_cap or 0.0
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.sinks = sinks
        self._sinks_of_model = sinks
        self.batch_invariant = bool(envs.VLLM_BATCH_INVARIANT)
        # vLLM sets an attribute of this name to None where it lets go of the caches.
        self._k_scale_cache: tuple[torch.Tensor, KVViews] | None = None

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        source, held = self._sinks_of_model, self.sinks
        if source is None or held is None:
            return
        if source.dtype is torch.float32:
            self.sinks = source.detach()
        elif held is source:
            self.sinks = source.detach().float()
        else:  # loaded again: graphs read where they were
            held.copy_(source)

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        attn_metadata: OstinatoMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend to the cache, which has the step's keys and values already.

        Args:
            layer: of vLLM, which has the scales of a cache in e4m3.
            query: [tokens, num_heads, head_size].
            key: not read, nor is `value`.
            value: likewise.
            kv_cache: [blocks, num_kv_heads, block_size, content] (see `kv_views`).
            attn_metadata: of the step; None in a run that measures memory, whose output is 0.
            output: like query, written; rows that belong to no sequence stay as they are.
            output_scale: must be None, as must `output_block_scale`.
            output_block_scale: likewise.

        Raises:
            NotImplementedError: for a quantised output.
        """
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("output_scale: got a tensor, expected None")
        if attn_metadata is None:
            return output.fill_(0)
        views = self._views(layer, kv_cache)
        for part in attn_metadata.parts:
            ops.paged_attention(
                query[part.first : part.last],
                views.k,
                views.v,
                part.page_table,
                part.seq_lens,
                cu_seqlens_q=part.cu_seqlens_q,
                max_seqlen_q=part.max_seqlen_q,
                max_tokens_k=part.max_tokens_k,
                scale=self.scale,
                causal=attn_metadata.causal,
                window=self.window,
                softcap=self.softcap,
                sinks=self.sinks,
                k_scale=views.k_scale,
                v_scale=views.v_scale,
                out=output[part.first : part.last],
                workspace=attn_metadata.workspace if part.max_tokens_k is None else None,
                batch_invariant=self.batch_invariant,
            )
        return output

    def do_kv_cache_update(
        self,
        layer: Any,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Write keys and values [tokens, num_kv_heads, head_size] to their slots.

        Rows behind those that have a slot, and rows of slot -1, are padding.
        """
        tokens, views = slot_mapping.size(0), self._views(layer, kv_cache)
        ops.append_kv(
            key[:tokens],
            value[:tokens],
            views.k,
            views.v,
            slot_mapping,
            k_scale=views.k_scale,
            v_scale=views.v_scale,
        )

    def fused_rope_kvcache_supported(self) -> bool:
        return True

    def do_rope_and_kv_cache_update(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        positions: torch.Tensor,
        cos_sin_cache: torch.Tensor,
        is_neox: bool,
        kv_cache: torch.Tensor,
        layer_slot_mapping: torch.Tensor,
    ) -> None:
        """Rotate queries in place, and write rotated keys, and values, to their slots: one launch.

        `key` stays as it is, since attention reads keys from the cache.
        """
        tokens, views = layer_slot_mapping.size(0), self._views(layer, kv_cache)
        queries = query[:tokens].view(tokens, self.num_heads, self.head_size)
        keys, values = (
            x[:tokens].view(tokens, self.num_kv_heads, self.head_size) for x in (key, value)
        )
        ops.append_kv(
            keys,
            values,
            views.k,
            views.v,
            layer_slot_mapping,
            positions=positions[:tokens].to(torch.int32),
            cos_sin=fp32_angles(cos_sin_cache),
            q=queries,
            q_out=queries,
            interleaved=not is_neox,
            k_scale=views.k_scale,
            v_scale=views.v_scale,
        )

    def _views(self, layer: Any, kv_cache: torch.Tensor) -> KVViews:
        """Return the views of a layer's cache; making them takes the host longer than a launch."""
        known = self._k_scale_cache
        if known is not None and known[0] is kv_cache:
            return known[1]
        scales = (layer._k_scale, layer._v_scale)
        views = kv_views(kv_cache, self.kv_cache_dtype, self.head_size, *scales)
        self._k_scale_cache = (kv_cache, views)
        return views
