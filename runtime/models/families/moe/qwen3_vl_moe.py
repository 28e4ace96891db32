"""Qwen3-VL-MoE: the text tower is Qwen3-MoE, with positions of three axes."""

from __future__ import annotations

from dataclasses import replace

from ...config import ModelConfig
from ...config_fields import Fields
from ...experts.config import read_experts, sparse_layers
from ...registry import Family, Tower, register
from ...required_kernels import kernels_with_experts
from ..towers.qwen3_vl import vl_config
from .mixture import ExpertNames, MixtureLlama, mixture_layout


def _config(fields: Fields) -> ModelConfig:
    config = vl_config(fields)
    layers = sparse_layers(fields, config.num_layers)
    return replace(config, experts=read_experts(fields, layers, normalized=True))


_TEXT_DEFAULTS = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "moe_intermediate_size": 1408,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "max_position_embeddings": 128000,
    "tie_word_embeddings": True,
}

register(
    Family(
        "qwen3_vl_moe_text",
        (),
        _config,
        mixture_layout(ExpertNames(transposable=True)),
        MixtureLlama.load,
        kernels=kernels_with_experts,
        defaults={"rope_theta": 500000.0},
        text_defaults=_TEXT_DEFAULTS,
    )
)
register(Tower("qwen3_vl_moe", ("Qwen3VLMoeForConditionalGeneration",), "qwen3_vl_moe_text"))
