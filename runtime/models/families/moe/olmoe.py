"""OLMoE: Llama's layer with norms over all heads of q and k, and a mixture of experts."""

from __future__ import annotations

from dataclasses import replace

from ...config import ModelConfig, full_attention, standard_config
from ...config_fields import Fields
from ...experts.config import read_experts
from ...registry import Family, register
from ...required_kernels import kernels_with_experts
from .mixture import ExpertNames, MixtureLlama, mixture_layout, with_norms_of_all_heads


def _config(fields: Fields) -> ModelConfig:
    fields.choice("clip_qkv", None)
    bias = fields.boolean("attention_bias", False)
    config = standard_config(
        fields, windows=full_attention, qkv_bias=bias, o_bias=bias, mlp_bias=False
    )
    experts = read_experts(fields, (True,) * config.num_layers, size="intermediate_size")
    return replace(config, experts=experts)


_DEFAULTS = {
    "eos_token_id": 50279,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "rms_norm_eps": 1e-5,
}

register(
    Family(
        "olmoe",
        ("OlmoeForCausalLM",),
        _config,
        mixture_layout(ExpertNames(), with_norms_of_all_heads),
        MixtureLlama.load,
        kernels=kernels_with_experts,
        defaults=_DEFAULTS,
    )
)
