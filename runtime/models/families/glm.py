"""GLM-4 of 2024: Llama's layer, with RoPE of neighbours in half of a head, and gate_up stored."""

from __future__ import annotations

from dataclasses import replace

from ..config import ModelConfig, full_attention, same_rope, standard_config
from ..config_fields import Fields
from ..layout import DecoderLayout
from ..modules import Module, Section
from ..registry import Family, register
from .llama import LayerParts, Llama, layer_parts, layout_of

DEFAULTS = {
    "eos_token_id": [151329, 151336, 151338],
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1.5625e-7,
}


def layout(config: ModelConfig) -> DecoderLayout:
    """Return the parts of a decoder of this shape."""
    return layout_of(config, glm_parts)


def glm_parts(config: ModelConfig, index: int) -> LayerParts:
    """Return the parts of a layer."""
    # One matrix [gate; up], each half of which ranks divide.
    name, rows = f"model.layers.{index}.mlp.gate_up_proj", config.intermediate_size
    gate_up = Module(name, 2 * rows, config.hidden_size, sections=(Section(rows),) * 2)
    usual = layer_parts(config, index)
    return replace(usual, gate_up=replace(usual.gate_up, modules=(gate_up,)))


def glm_config(fields: Fields) -> ModelConfig:
    """Read the fields of config.json."""
    fields.require("num_key_value_heads")
    fields.integer("head_dim")  # whose default is not hidden_size / num_attention_heads
    return standard_config(
        fields,
        windows=full_attention,
        qkv_bias=fields.boolean("attention_bias", True),
        o_bias=False,
        mlp_bias=False,
        ropes=same_rope(partial=True, interleaved=True),
    )


register(Family("glm", ("GlmForCausalLM",), glm_config, layout, Llama.load, defaults=DEFAULTS))
