"""InternLM3: Llama's layer, with two names of its own for biases."""

from __future__ import annotations

from ..config import LLAMA_IDS, ModelConfig, full_attention, standard_config
from ..config_fields import Fields
from ..registry import Family, register
from .llama import Llama, layout


def _config(fields: Fields) -> ModelConfig:
    fields.require("num_key_value_heads")
    fields.require("head_dim")  # whose default is not hidden_size / num_attention_heads
    bias = fields.boolean("bias", fields.boolean("mlp_bias", False))
    qkv_bias = fields.boolean("qkv_bias", fields.boolean("attention_bias", False))
    return standard_config(
        fields, windows=full_attention, qkv_bias=qkv_bias, o_bias=bias, mlp_bias=bias
    )


# Its own code and transformers differ in the class's name.
_ARCHITECTURES = ("InternLM3ForCausalLM", "LlamaForCausalLM")
_DEFAULTS = {**LLAMA_IDS, "rms_norm_eps": 1e-5}

register(Family("internlm3", _ARCHITECTURES, _config, layout, Llama.load, defaults=_DEFAULTS))
