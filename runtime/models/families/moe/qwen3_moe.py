"""Qwen3-MoE: Qwen3's attention, and mixtures of experts in all layers but some."""

from __future__ import annotations

from dataclasses import replace

from ...config import ModelConfig, standard_config, uniform_window
from ...config_fields import Fields
from ...experts.config import read_experts, sparse_layers
from ...registry import Family, register
from ...required_kernels import kernels_with_experts
from .mixture import ExpertNames, MixtureLlama, mixture_layout


def _config(fields: Fields) -> ModelConfig:
    fields.require("num_key_value_heads")
    fields.integer("head_dim")  # whose default is not hidden_size / num_attention_heads
    fields.require("norm_topk_prob")
    bias = fields.boolean("attention_bias", False)
    config = standard_config(
        fields, windows=_windows, qkv_bias=bias, o_bias=bias, mlp_bias=False, qk_norm=True
    )
    experts = read_experts(fields, sparse_layers(fields, config.num_layers))
    return replace(config, experts=experts)


def _windows(fields: Fields, num_layers: int) -> tuple[int | None, ...]:
    window = None
    if fields.boolean("use_sliding_window", False):
        window = fields.integer("sliding_window")
    return uniform_window(fields, num_layers, window)


register(
    Family(
        "qwen3_moe",
        ("Qwen3MoeForCausalLM",),
        _config,
        mixture_layout(ExpertNames()),
        MixtureLlama.load,
        kernels=kernels_with_experts,
    )
)
