"""dots.llm1: Qwen3's attention with windows, and mixtures of DeepSeek-V3's kind."""

from __future__ import annotations

from dataclasses import replace

from ...config import FULL, SLIDING, ModelConfig, layer_types, standard_config, windows_of_kinds
from ...config_fields import Fields
from ...registry import Family, register
from ...required_kernels import kernels_with_experts
from .glm4_moe import deepseek_experts
from .mixture import ExpertNames, MixtureLlama, mixture_layout


def _config(fields: Fields) -> ModelConfig:
    fields.require("num_key_value_heads")
    fields.require("norm_topk_prob")
    bias = fields.boolean("attention_bias", False)
    config = standard_config(
        fields, windows=_windows, qkv_bias=bias, o_bias=bias, mlp_bias=False, qk_norm=True
    )
    return replace(config, experts=deepseek_experts(fields, config.num_layers))


def _windows(fields: Fields, num_layers: int) -> tuple[int | None, ...]:
    kinds = layer_types(fields, num_layers)
    if not kinds:
        slides = fields.get("sliding_window") is not None
        first = fields.integer("max_window_layers", 62, least=0) if slides else num_layers
        kinds = tuple(FULL if layer < first else SLIDING for layer in range(num_layers))
    return windows_of_kinds(fields, kinds)


register(
    Family(
        "dots1",
        ("Dots1ForCausalLM",),
        _config,
        mixture_layout(ExpertNames()),
        MixtureLlama.load,
        kernels=kernels_with_experts,
    )
)
