"""StarCoder2: Llama's layer, with layer norms, biases, GELU without a gate, and a window."""

from __future__ import annotations

from dataclasses import replace

from ...config import ModelConfig, standard_config, uniform_window
from ...config_fields import Fields
from ...layout import DecoderLayout
from ...modules import Module
from ...norms import NormConfig
from ...registry import Family, register
from ..llama import LayerParts, Llama, layer_parts, layout_of


def _layout(config: ModelConfig) -> DecoderLayout:
    return layout_of(config, _layer)


def _layer(config: ModelConfig, index: int) -> LayerParts:
    hidden, intermediate = config.hidden_size, config.intermediate_size
    prefix, usual = f"model.layers.{index}.mlp.", layer_parts(config, index)
    up = Module(f"{prefix}c_fc", intermediate, hidden, config.mlp_bias)
    down = Module(f"{prefix}c_proj", hidden, intermediate, config.mlp_bias)
    return replace(
        usual,
        gate_up=replace(usual.gate_up, modules=(up,)),
        down=replace(usual.down, modules=(down,)),
    )


def _config(fields: Fields) -> ModelConfig:
    fields.require("num_key_value_heads")
    bias = fields.boolean("use_bias", True)
    return standard_config(
        fields,
        windows=_windows,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
        norm=NormConfig(fields.number("norm_epsilon", 1e-5), "layer_norm", has_bias=True),
        activations={"gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"},
    )


def _windows(fields: Fields, num_layers: int) -> tuple[int | None, ...]:
    return uniform_window(fields, num_layers, fields.optional_integer("sliding_window"))


_DEFAULTS = {"bos_token_id": 50256, "eos_token_id": 50256, "tie_word_embeddings": True}

register(
    Family(
        "starcoder2", ("Starcoder2ForCausalLM",), _config, _layout, Llama.load, defaults=_DEFAULTS
    )
)
