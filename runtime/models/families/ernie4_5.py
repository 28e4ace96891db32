"""ERNIE 4.5, the dense models: Llama's layer, with RoPE of neighbouring elements."""

from __future__ import annotations

from ..config import LLAMA_IDS, ModelConfig, full_attention, same_rope, standard_config
from ..config_fields import Fields
from ..registry import Family, register
from .llama import Llama, layout


def ernie_config(fields: Fields) -> ModelConfig:
    """Return the shape of ERNIE's decoder, but for what it may have instead of MLPs."""
    fields.require("num_key_value_heads")
    bias = fields.boolean("use_bias", False)
    return standard_config(
        fields,
        windows=full_attention,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
        ropes=same_rope(interleaved=True),
    )


def _config(fields: Fields) -> ModelConfig:
    fields.require("head_dim")  # whose default is not hidden_size / num_attention_heads
    return ernie_config(fields)


DEFAULTS = {
    **LLAMA_IDS,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
}

register(
    Family("ernie4_5", ("Ernie4_5ForCausalLM",), _config, layout, Llama.load, defaults=DEFAULTS)
)
