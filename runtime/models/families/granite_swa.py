"""Granite with windows, RoPE bases and attention sinks of each layer's own."""

from __future__ import annotations

from dataclasses import replace

from ..config import (
    FULL,
    SLIDING,
    ModelConfig,
    layer_types,
    read_rope,
    standard_config,
    windows_of_kinds,
)
from ..config_fields import Fields
from ..layout import DecoderLayout
from ..modules import TensorSpec
from ..parts import TensorPart
from ..registry import Family, register
from ..rope import RopeConfig
from .granite import with_multipliers
from .llama import LayerParts, Llama, layer_parts, layout_of


def layout(config: ModelConfig) -> DecoderLayout:
    """Return the parts of a decoder of this shape."""
    return layout_of(config, _layer)


def _layer(config: ModelConfig, index: int) -> LayerParts:
    spec = TensorSpec((f"model.layers.{index}.self_attn.sinks",), ((config.num_heads,),))
    return replace(layer_parts(config, index), sinks=TensorPart(spec, divided=True))


def _config(fields: Fields) -> ModelConfig:
    fields.require("num_key_value_heads")
    bias = fields.boolean("attention_bias", False)
    config = standard_config(fields, windows=_windows, qkv_bias=bias, o_bias=bias, ropes=_ropes)
    return with_multipliers(config, fields)


def _windows(fields: Fields, num_layers: int) -> tuple[int | None, ...]:
    kinds = layer_types(fields, num_layers) or tuple(
        SLIDING if layer % 4 else FULL for layer in range(num_layers)
    )
    return windows_of_kinds(fields, kinds)


def _ropes(fields: Fields, num_layers: int) -> tuple[RopeConfig | None, ...]:
    rope = read_rope(fields)
    if fields.get("layer_rope_theta") is None:
        return (rope,) * num_layers
    bases = fields.numbers("layer_rope_theta", least=0.0)  # 0: no positions
    if len(bases) != num_layers or any(0.0 < base <= 1.0 for base in bases):
        raise fields.wrong("layer_rope_theta", f"{num_layers} numbers that are 0 or above 1")
    return tuple(replace(rope, theta=base) if base else None for base in bases)


_DEFAULTS = {
    "bos_token_id": 100257,
    "eos_token_id": 100257,
    "rms_norm_eps": 1e-5,
    "sliding_window": 128,
    "tie_word_embeddings": True,
}

register(
    Family(
        "granite_swa", ("GraniteSWAForCausalLM",), _config, layout, Llama.load, defaults=_DEFAULTS
    )
)
