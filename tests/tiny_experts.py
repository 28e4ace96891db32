"""Small random models with mixtures of experts, for tests that need no checkpoint."""

from __future__ import annotations

from typing import Any

import torch

from ostinato.bench.weights import random_decoder
from ostinato.models import Decoder, read_config

# Sizes that no tile of a kernel divides, and a vocabulary for `tiny.byte_tokenizer`.
SIZES: dict[str, Any] = {
    "vocab_size": 257,
    "hidden_size": 192,
    "intermediate_size": 208,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 128,
    "eos_token_id": 256,
    "bos_token_id": None,
    "dtype": "bfloat16",
}
_EXPERTS = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 72}
# One of each kind of router and of what stands beside the experts.
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {**_EXPERTS, "norm_topk_prob": True},
    "qwen2_moe": {**_EXPERTS, "shared_expert_intermediate_size": 104},
    "mixtral": {"intermediate_size": 104, "num_local_experts": 8, "num_experts_per_tok": 2},
    "olmoe": {"intermediate_size": 72, "num_experts": 16, "num_experts_per_tok": 4},
    "granitemoe": {
        "intermediate_size": 72,
        "num_local_experts": 16,
        "num_experts_per_tok": 4,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.1,
    },
    "glm4_moe": {
        "n_routed_experts": 16,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 72,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 1.5,
        "use_qk_norm": True,
    },
    "minimax_m2": {"intermediate_size": 72, "num_local_experts": 16, "num_experts_per_tok": 4},
}


def tiny_experts(
    family: str, precision: str, device: torch.device | str = "cpu", **fields: Any
) -> Decoder:
    """Return a random decoder of a family in bf16, whose linear layers are of a precision."""
    config = read_config({**SIZES, "model_type": family, **FAMILIES[family], **fields})
    return random_decoder(config, precision, torch.device(device), max_context=128)
