"""Seed-OSS: Llama's layer, with biases of q, k and v."""

from __future__ import annotations

from ..config import ModelConfig, full_attention, standard_config
from ..config_fields import Fields
from ..registry import Family, register
from .llama import Llama, layout


def _config(fields: Fields) -> ModelConfig:
    fields.require("num_key_value_heads")
    fields.require("head_dim")  # whose default is not hidden_size / num_attention_heads
    return standard_config(
        fields,
        windows=full_attention,
        qkv_bias=fields.boolean("attention_bias", True),
        o_bias=fields.boolean("attention_out_bias", False),
    )


_DEFAULTS = {"bos_token_id": 0, "eos_token_id": 2}

register(
    Family("seed_oss", ("SeedOssForCausalLM",), _config, layout, Llama.load, defaults=_DEFAULTS)
)
