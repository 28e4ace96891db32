"""What the attention backend takes of SGLang, on a CPU: its own pools, and plain settings."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

HEADS, KV_HEADS, DIM, LAYERS, CONTEXT = 4, 2, 64, 2, 96


def runner(page_size: int, dtype: torch.dtype = torch.bfloat16, **changes: Any) -> Any:
    """Return what a backend takes of SGLang's model runner: real pools, and plain settings."""
    pool = MHATokenToKVPool(
        size=20 * 16,
        page_size=page_size,
        dtype=dtype,
        head_num=KV_HEADS,
        head_dim=DIM,
        layer_num=LAYERS,
        device="cpu",
        enable_memory_saver=False,
    )
    rows = ReqToTokenPool(size=6, max_context_len=CONTEXT, device="cpu", enable_memory_saver=False)
    settings: dict[str, Any] = {
        "spec_algorithm": SpeculativeAlgorithm.NONE,
        "use_mla_backend": False,
        "is_hybrid_swa": False,
        "page_size": page_size,
        "token_to_kv_pool": pool,
        "req_to_token_pool": rows,
        "model_config": SimpleNamespace(context_len=CONTEXT),
        "server_args": SimpleNamespace(enable_deterministic_inference=False),
    }
    return SimpleNamespace(**{**settings, **changes})
