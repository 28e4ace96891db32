"""Configurations of small random models with mixtures of experts."""

from __future__ import annotations

from typing import Any

from hf_shapes import IDS, SHAPE, SLIDING_FIRST, TIED, rope
from transformers import (
    Dots1Config,
    Ernie4_5_MoeConfig,
    Glm4MoeConfig,
    GraniteMoeConfig,
    HunYuanMoEV1Config,
    MiniMaxM2Config,
    MixtralConfig,
    OlmoeConfig,
    PreTrainedConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

# Sizes that no tile of a kernel divides.
_EXPERTS: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
_LOCAL: dict[str, Any] = {"num_local_experts": 6, "num_experts_per_tok": 2}
_DEEPSEEK: dict[str, Any] = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.7,
}
_ERNIE: dict[str, Any] = {"moe_num_experts": 8, "moe_k": 3, "moe_intermediate_size": 24}

WITH_EXPERTS: dict[str, PreTrainedConfig] = {
    "qwen3_moe": Qwen3MoeConfig(**SHAPE, **_EXPERTS, head_dim=16, norm_topk_prob=True),
    "qwen3_moe-mlp": Qwen3MoeConfig(
        **TIED,
        **_EXPERTS,
        head_dim=8,
        attention_bias=True,
        mlp_only_layers=[1],
        use_sliding_window=True,
        sliding_window=8,
    ),
    "mixtral": MixtralConfig(**SHAPE, **_LOCAL),
    "mixtral-window": MixtralConfig(**SHAPE, **_LOCAL, head_dim=16, sliding_window=8),
    "qwen2_moe": Qwen2MoeConfig(**SHAPE, **_EXPERTS, shared_expert_intermediate_size=40),
    "qwen2_moe-mlp": Qwen2MoeConfig(
        **SHAPE,
        **_EXPERTS,
        shared_expert_intermediate_size=40,
        norm_topk_prob=True,
        decoder_sparse_step=2,
        qkv_bias=False,
    ),
    "olmoe": OlmoeConfig(**SHAPE, **IDS, num_experts=6, num_experts_per_tok=2),
    "granitemoe": GraniteMoeConfig(
        **TIED,
        **_LOCAL,
        rms_norm_eps=0.05,
        embedding_multiplier=3.0,
        attention_multiplier=0.2,
        residual_multiplier=0.3,
        logits_scaling=1.6,
    ),
    "glm4_moe": Glm4MoeConfig(
        **SHAPE, **IDS, **_DEEPSEEK, head_dim=16, use_qk_norm=True, attention_bias=True
    ),
    "glm4_moe-groups": Glm4MoeConfig(
        **SHAPE,
        **IDS,
        **{**_DEEPSEEK, "first_k_dense_replace": 0},
        n_group=4,
        topk_group=2,
        norm_topk_prob=False,
    ),
    "ernie4_5_moe": Ernie4_5_MoeConfig(**TIED, **_ERNIE),
    "ernie4_5_moe-interval": Ernie4_5_MoeConfig(
        **SHAPE,
        **_ERNIE,
        moe_num_shared_experts=0,
        moe_layer_start_index=0,
        moe_layer_interval=2,
    ),
    "hunyuan_v1_moe": HunYuanMoEV1Config(
        **{**SHAPE, "intermediate_size": 24}, head_dim=16, num_experts=6, moe_topk=[2, 2]
    ),
    "minimax_m2": MiniMaxM2Config(
        **SHAPE,
        **IDS,
        **_LOCAL,
        head_dim=16,
        rope_parameters=rope("default", partial_rotary_factor=0.5),
    ),
    "dots1": Dots1Config(
        **SHAPE,
        **IDS,
        **_DEEPSEEK,
        n_group=2,
        topk_group=1,
        norm_topk_prob=True,
        sliding_window=8,
        layer_types=SLIDING_FIRST,
    ),
}
