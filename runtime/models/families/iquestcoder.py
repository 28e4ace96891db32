"""IQuest-Coder: Llama's layer."""

from __future__ import annotations

from ..config import LLAMA_IDS, ModelConfig, full_attention, standard_config
from ..config_fields import Fields
from ..registry import Family, register
from .llama import Llama, layout


def _config(fields: Fields) -> ModelConfig:
    fields.require("num_key_value_heads")
    fields.require("head_dim")  # whose default is not hidden_size / num_attention_heads
    fields.choice("clip_qkv", None)
    fields.choice("use_sliding_window", False, default=False)
    bias = fields.boolean("attention_bias", False)
    return standard_config(fields, windows=full_attention, qkv_bias=bias, o_bias=bias)


# Its own code and transformers differ in the class's name.
_ARCHITECTURES = ("IQuestCoderForCausalLM", "LlamaForCausalLM")
_DEFAULTS = {**LLAMA_IDS, "rms_norm_eps": 1e-5}

register(Family("iquestcoder", _ARCHITECTURES, _config, layout, Llama.load, defaults=_DEFAULTS))
