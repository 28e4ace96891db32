"""Granite-MoE: Granite's factors, and mixtures of experts that are stored together."""

from __future__ import annotations

from dataclasses import replace

from ...config import LLAMA_IDS, ModelConfig, full_attention, standard_config
from ...config_fields import Fields
from ...experts.config import read_experts
from ...registry import Family, register
from ...required_kernels import kernels_with_experts
from ..granite import with_multipliers
from .mixture import ExpertNames, MixtureLlama, mixture_layout

NAMES = ExpertNames(
    block="block_sparse_moe",
    router="router.layer",
    together=("input_linear", "output_linear"),
)


def granite_config(fields: Fields) -> ModelConfig:
    """Read the fields of config.json."""
    bias = fields.boolean("attention_bias", False)
    config = standard_config(
        fields, windows=full_attention, qkv_bias=bias, o_bias=bias, mlp_bias=False
    )
    experts = read_experts(
        fields,
        (True,) * config.num_layers,
        size="intermediate_size",
        normalized=True,
    )
    return replace(with_multipliers(config, fields), experts=experts)


DEFAULTS = {**LLAMA_IDS, "num_experts_per_tok": 2, "num_local_experts": 8}

register(
    Family(
        "granitemoe",
        ("GraniteMoeForCausalLM",),
        granite_config,
        mixture_layout(NAMES),
        MixtureLlama.load,
        kernels=kernels_with_experts,
        defaults=DEFAULTS,
    )
)
