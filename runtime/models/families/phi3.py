"""Phi-3, Phi-3.5, phi-4 and Phi-4-mini: Llama's layer, with q, k, v and gate, up stored as one."""

from __future__ import annotations

from dataclasses import replace

from ..config import ModelConfig, read_rope, standard_config, uniform_window
from ..config_fields import Fields
from ..layout import DecoderLayout
from ..modules import Module, Section
from ..registry import Family, register
from ..rope import RopeConfig
from .glm import glm_parts
from .llama import LayerParts, Llama, layout_of


def _layout(config: ModelConfig) -> DecoderLayout:
    return layout_of(config, _parts)


def _parts(config: ModelConfig, index: int) -> LayerParts:
    # One matrix [q; k; v], of which ranks divide each.
    name, rows = f"model.layers.{index}.self_attn.qkv_proj", config.q_size + 2 * config.kv_size
    q = Section(config.q_size, config.num_heads)
    kv = Section(config.kv_size, config.num_kv_heads, replicated=True)
    qkv = Module(name, rows, config.hidden_size, sections=(q, kv, kv))
    usual = glm_parts(config, index)
    return replace(usual, qkv=replace(usual.qkv, modules=(qkv,)))


def _config(fields: Fields) -> ModelConfig:
    return standard_config(
        fields, windows=_windows, qkv_bias=False, o_bias=False, mlp_bias=False, ropes=_ropes
    )


def _windows(fields: Fields, num_layers: int) -> tuple[int | None, ...]:
    return uniform_window(fields, num_layers, fields.optional_integer("sliding_window"))


def _ropes(fields: Fields, num_layers: int) -> tuple[RopeConfig, ...]:
    rope = read_rope(fields, partial=True)
    if rope.type not in ("default", "longrope"):
        # transformers knows no others here, and reads the first files' "yarn" as "longrope".
        name = "rope_parameters" if fields.get("rope_scaling") is None else "rope_scaling"
        raise fields.wrong(name, "the type 'default' or 'longrope'")
    return (rope,) * num_layers


_DEFAULTS = {
    "bos_token_id": 1,
    "eos_token_id": 32000,
    "original_max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
}

register(Family("phi3", ("Phi3ForCausalLM",), _config, _layout, Llama.load, defaults=_DEFAULTS))
