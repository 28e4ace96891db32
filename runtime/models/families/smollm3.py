"""SmolLM3: Llama's layer, without positions (NoPE) in every fourth layer."""

from __future__ import annotations

from ..config import SLIDING, ModelConfig, full_attention, layer_types, read_rope, standard_config
from ..config_fields import Fields
from ..registry import Family, register
from ..rope import RopeConfig
from .llama import Llama, layout


def _config(fields: Fields) -> ModelConfig:
    fields.require("num_key_value_heads")
    bias = fields.boolean("attention_bias", False)
    return standard_config(fields, windows=_windows, qkv_bias=bias, o_bias=bias, ropes=_ropes)


def _rotated(fields: Fields, num_layers: int) -> tuple[bool, ...]:
    """Return whether each layer rotates its heads."""
    if fields.get("no_rope_layers") is None:
        interval = fields.integer("no_rope_layer_interval", 4)
        return tuple((layer + 1) % interval != 0 for layer in range(num_layers))
    written = fields.integers("no_rope_layers", least=0, most=1)  # 1: with RoPE
    if len(written) < num_layers:
        raise fields.wrong("no_rope_layers", f"at least {num_layers} numbers")
    return tuple(map(bool, written[:num_layers]))


def _ropes(fields: Fields, num_layers: int) -> tuple[RopeConfig | None, ...]:
    rope = read_rope(fields)
    return tuple(rope if rotated else None for rotated in _rotated(fields, num_layers))


def _windows(fields: Fields, num_layers: int) -> tuple[int | None, ...]:
    window = fields.optional_integer("sliding_window")
    if not fields.boolean("use_sliding_window", False) or window is None:
        return full_attention(fields, num_layers)
    written = layer_types(fields, num_layers)
    if written:
        return tuple(window if kind == SLIDING else None for kind in written)
    return tuple(None if rotated else window for rotated in _rotated(fields, num_layers))


_DEFAULTS = {
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "rope_theta": 2000000.0,
    "tie_word_embeddings": True,
}

register(
    Family("smollm3", ("SmolLM3ForCausalLM",), _config, layout, Llama.load, defaults=_DEFAULTS)
)
