"""Mistral: Llama's layer, with a sliding window in every layer unless it is null."""

from __future__ import annotations

from ..config import LLAMA_IDS, ModelConfig, standard_config, uniform_window
from ..config_fields import Fields
from ..registry import Family, register
from .llama import Llama, layout


def _config(fields: Fields) -> ModelConfig:
    bias = fields.boolean("attention_bias", False)
    fields.require("num_key_value_heads")
    return standard_config(fields, windows=_windows, qkv_bias=bias, o_bias=bias)


def _windows(fields: Fields, num_layers: int) -> tuple[int | None, ...]:
    fields.require("sliding_window")
    return uniform_window(fields, num_layers, fields.optional_integer("sliding_window"))


register(
    Family("mistral", ("MistralForCausalLM",), _config, layout, Llama.load, defaults=LLAMA_IDS)
)
