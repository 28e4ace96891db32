"""Mistral: Llama's layer, with a sliding window in every layer, or in those of `layer_types`."""

from __future__ import annotations

from ..config import (
    LLAMA_IDS,
    SLIDING,
    ModelConfig,
    layer_types,
    standard_config,
    uniform_window,
    windows_of_kinds,
)
from ..config_fields import Fields
from ..registry import Family, register
from .llama import Llama, layout


def mistral_config(fields: Fields) -> ModelConfig:
    """Read the fields of config.json."""
    bias = fields.boolean("attention_bias", False)
    fields.require("num_key_value_heads")
    return standard_config(fields, windows=_windows, qkv_bias=bias, o_bias=bias)


def _windows(fields: Fields, num_layers: int) -> tuple[int | None, ...]:
    kinds = layer_types(fields, num_layers)
    if SLIDING not in kinds:
        window = None if kinds else fields.optional_integer("sliding_window")
        return uniform_window(fields, num_layers, window)
    return windows_of_kinds(fields, kinds)


DEFAULTS = {**LLAMA_IDS, "sliding_window": 4096}
_TEXT_DEFAULTS = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
}

register(
    Family(
        "mistral",
        ("MistralForCausalLM",),
        mistral_config,
        layout,
        Llama.load,
        defaults=DEFAULTS,
        text_defaults=_TEXT_DEFAULTS,
    )
)
