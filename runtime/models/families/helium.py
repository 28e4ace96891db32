"""Helium: Llama's layer, with RoPE of neighbouring elements."""

from __future__ import annotations

from ..config import LLAMA_IDS, ModelConfig, full_attention, same_rope, standard_config
from ..config_fields import Fields
from ..registry import Family, register
from .llama import Llama, layout


def _config(fields: Fields) -> ModelConfig:
    fields.require("num_key_value_heads")
    fields.integer("head_dim")  # whose default is not hidden_size / num_attention_heads
    return standard_config(
        fields,
        windows=full_attention,
        qkv_bias=fields.boolean("attention_bias", False),
        o_bias=False,
        ropes=same_rope(interleaved=True),
    )


_DEFAULTS = {**LLAMA_IDS, "rms_norm_eps": 1e-8, "rope_theta": 100000.0}

register(Family("helium", ("HeliumForCausalLM",), _config, layout, Llama.load, defaults=_DEFAULTS))
