"""Arcee: Llama's layer, with ReLU² without a gate."""

from __future__ import annotations

from ..config import ModelConfig, full_attention, standard_config
from ..config_fields import Fields
from ..registry import Family, register
from .llama import Llama, layout


def _config(fields: Fields) -> ModelConfig:
    bias = fields.boolean("attention_bias", False)
    return standard_config(
        fields,
        windows=full_attention,
        qkv_bias=bias,
        o_bias=bias,
        activations={"relu2": "relu2"},
    )


_DEFAULTS = {"bos_token_id": 128000, "eos_token_id": 128001, "rms_norm_eps": 1e-5}

register(Family("arcee", ("ArceeForCausalLM",), _config, layout, Llama.load, defaults=_DEFAULTS))
