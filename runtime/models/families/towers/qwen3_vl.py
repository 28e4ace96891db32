"""Qwen3-VL (dense): the text tower is Qwen3, with positions of three axes."""

from __future__ import annotations

from ...config import ModelConfig, full_attention, same_rope, standard_config
from ...config_fields import Fields
from ...registry import Family, Tower, register
from ..llama import Llama, layout


def vl_config(fields: Fields) -> ModelConfig:
    """Read the fields of a text tower."""
    bias = fields.boolean("attention_bias", False)
    return standard_config(
        fields,
        windows=full_attention,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=True,
        mlp_bias=False,
        ropes=same_rope(multimodal=True),
    )


_TEXT_DEFAULTS = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 128,
    "max_position_embeddings": 128000,
}

register(
    Family(
        "qwen3_vl_text",
        (),
        vl_config,
        layout,
        Llama.load,
        defaults={"rope_theta": 500000.0},
        text_defaults=_TEXT_DEFAULTS,
    )
)
register(Tower("qwen3_vl", ("Qwen3VLForConditionalGeneration",), "qwen3_vl_text"))
