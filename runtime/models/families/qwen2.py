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


_TEXT_DEFAULTS = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
    "max_window_layers": 28,
}

register(
    Family(
        "qwen2",
        ("Qwen2ForCausalLM",),
        _config,
        layout,
        Llama.load,
        text_defaults=_TEXT_DEFAULTS,
    )
)
