"""Jais 2: Llama's layer, with layer norms, biases, and ReLU² without a gate."""

from __future__ import annotations

from ...config import ModelConfig, full_attention, standard_config
from ...config_fields import Fields
from ...norms import NormConfig
from ...registry import Family, register
from ..llama import Llama, layout


def _config(fields: Fields) -> ModelConfig:
    bias = fields.boolean("attention_bias", True)
    return standard_config(
        fields,
        windows=full_attention,
        qkv_bias=bias,
        o_bias=bias,
        norm=NormConfig(fields.number("layer_norm_eps", 1e-5), "layer_norm", has_bias=True),
        activations={"relu2": "relu2"},
    )


_DEFAULTS = {"bos_token_id": 0, "eos_token_id": 150024, "mlp_bias": True}

register(Family("jais2", ("Jais2ForCausalLM",), _config, layout, Llama.load, defaults=_DEFAULTS))
