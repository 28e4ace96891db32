"""Qwen2 and Qwen2.5: Llama's layer, with biases of q, k and v, and windows from some layer on."""

from __future__ import annotations

from ..config import ModelConfig, mixed_windows, standard_config
from ..config_fields import Fields
from ..registry import Family, register
from .llama import Llama, layout


def _config(fields: Fields) -> ModelConfig:
    fields.require("num_key_value_heads")
    # Always a bias of q, k and v and never of o, whatever attention_bias says.
    return standard_config(fields, windows=mixed_windows, qkv_bias=True, o_bias=False)


register(Family("qwen2", ("Qwen2ForCausalLM",), _config, layout, Llama.load))
