"""Mixtral: Mistral's attention, and a mixture of experts in every layer."""

from __future__ import annotations

from dataclasses import replace

from ...config import LLAMA_IDS, ModelConfig, standard_config, uniform_window
from ...config_fields import Fields
from ...experts.config import read_experts
from ...registry import Family, register
from ...required_kernels import kernels_with_experts
from .mixture import MIXTRAL_NAMES, MixtureLlama, mixture_layout


def _config(fields: Fields) -> ModelConfig:
    fields.require("num_key_value_heads")
    config = standard_config(fields, windows=_windows, qkv_bias=False, o_bias=False, mlp_bias=False)
    experts = read_experts(
        fields,
        (True,) * config.num_layers,
        size="intermediate_size",
        normalized=True,
    )
    return replace(config, experts=experts)


def _windows(fields: Fields, num_layers: int) -> tuple[int | None, ...]:
    return uniform_window(fields, num_layers, fields.optional_integer("sliding_window"))


_DEFAULTS = {
    **LLAMA_IDS,
    "num_experts_per_tok": 2,
    "num_local_experts": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000000.0,
}

register(
    Family(
        "mixtral",
        ("MixtralForCausalLM",),
        _config,
        mixture_layout(MIXTRAL_NAMES),
        MixtureLlama.load,
        kernels=kernels_with_experts,
        defaults=_DEFAULTS,
    )
)
