"""Nemotron-4, Minitron: layer norms with weights stored less 1, ReLU² without a gate."""

from __future__ import annotations

from ...config import ModelConfig, full_attention, same_rope, standard_config
from ...config_fields import Fields
from ...norms import NormConfig
from ...registry import Family, register
from ..llama import Llama, layout


def _config(fields: Fields) -> ModelConfig:
    fields.integer("num_key_value_heads")  # which has no default in transformers
    bias = fields.boolean("attention_bias", False)
    eps = fields.number("norm_eps", 1e-5)
    return standard_config(
        fields,
        windows=full_attention,
        qkv_bias=bias,
        o_bias=bias,
        ropes=same_rope(partial=True),
        norm=NormConfig(eps, "layer_norm", has_bias=True, plus_one=True),
        activations={"relu2": "relu2"},
    )


_DEFAULTS = {"bos_token_id": 2, "eos_token_id": 3, "partial_rotary_factor": 0.5}

register(
    Family("nemotron", ("NemotronForCausalLM",), _config, layout, Llama.load, defaults=_DEFAULTS)
)
