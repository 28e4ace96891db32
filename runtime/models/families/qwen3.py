"""Qwen3: Llama's layer, with RMS norms of each head of q and k before RoPE."""

from __future__ import annotations

from ..config import ModelConfig, mixed_windows, standard_config
from ..config_fields import Fields
from ..registry import Family, register
from .llama import Llama, layout


def _config(fields: Fields) -> ModelConfig:
    fields.require("num_key_value_heads")
    fields.integer("head_dim")  # whose default is not hidden_size / num_attention_heads
    bias = fields.boolean("attention_bias", False)
    return standard_config(fields, windows=mixed_windows, qkv_bias=bias, o_bias=bias, qk_norm=True)


register(Family("qwen3", ("Qwen3ForCausalLM",), _config, layout, Llama.load))
