"""What vLLM asks of an attention backend, answered for ours."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from vllm.config import get_current_vllm_config_or_none
from vllm.v1.attention.backend import AttentionBackend, MultipleOf

from ...ops.attention.decode_variants import AttentionDecode
from ...ops.attention.prefill_variants import AttentionPrefill
from .attention_impl import OstinatoAttentionImpl
from .attention_metadata import OstinatoMetadataBuilder
from .kv_views import packed_spec


class OstinatoAttentionBackend(AttentionBackend):
    """Decoder attention by `ops.paged_attention`: full, sliding-window, with sinks, softcap."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16, torch.float16]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = [
        "auto",
        "float16",
        "bfloat16",
        "fp8",
        "fp8_e4m3",
        "int8_per_token_head",
        "fp8_per_token_head",
    ]
    forward_includes_kv_cache_update = False
    supports_kv_cache_update_bypass = True

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[OstinatoAttentionImpl]:
        return OstinatoAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[OstinatoMetadataBuilder]:
        return OstinatoMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return [MultipleOf(16)]

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        return packed_spec(spec)

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return head_size % 16 == 0 and 16 <= head_size <= 256

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        own = (capability.major, capability.minor)
        return AttentionDecode.supports(own) and AttentionPrefill.supports(own)

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: str | None,
        *others: Any,
        **more: Any,
    ) -> str | None:
        """Return why queries of `dtype` have no kernel for a cache, None where they have one."""
        named = {"float16": torch.float16, "bfloat16": torch.bfloat16}.get(kv_cache_dtype or "")
        if named not in (None, dtype):
            return f"a {kv_cache_dtype} cache needs queries of {kv_cache_dtype}, got {dtype}"
        return None

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        """Return False: decodes are told from prompts by what the host knows of their queries."""
        return False

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """Return whether no prompt is cut where the load says so.

        Bits of a query do not depend on the other sequences. They do depend on where its prompt was
        cut, unless at multiples of 384 tokens, and vLLM cuts prompts by what else there is to do:
        with chunked prefill, and behind a prefix that it finds in its cache. With speculative
        decoding a text with fewer drafts than those beside it is computed as a prompt.
        """
        config = get_current_vllm_config_or_none()
        return config is not None and not (
            config.scheduler_config.enable_chunked_prefill
            or config.cache_config.enable_prefix_caching
            or config.speculative_config is not None
        )
