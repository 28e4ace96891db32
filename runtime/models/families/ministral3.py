"""Ministral 3: Mistral's layer, with queries that grow by position beyond the first context."""

from __future__ import annotations

from ..config import LLAMA_IDS, ModelConfig, same_rope, standard_config, uniform_window
from ..config_fields import Fields
from ..registry import Family, register
from .llama import Llama, layout


def _config(fields: Fields) -> ModelConfig:
    fields.require("num_key_value_heads")
    fields.require("head_dim")  # whose default is not hidden_size / num_attention_heads
    if fields.get("rope_scaling") is None:
        fields.child("rope_parameters")  # whose default is YaRN
    return standard_config(
        fields,
        windows=_windows,
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        ropes=same_rope(query_scaling=True),
    )


def _windows(fields: Fields, num_layers: int) -> tuple[int | None, ...]:
    return uniform_window(fields, num_layers, fields.optional_integer("sliding_window"))


_DEFAULTS = {**LLAMA_IDS, "rms_norm_eps": 1e-5}

register(
    Family(
        "ministral3", ("Ministral3ForCausalLM",), _config, layout, Llama.load, defaults=_DEFAULTS
    )
)
