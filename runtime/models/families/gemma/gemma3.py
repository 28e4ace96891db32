"""Gemma 3: Gemma 2's layer, with norms of each head of q and k, and RoPE of two kinds."""

from __future__ import annotations

from dataclasses import replace

from ...config import FULL, SLIDING, ModelConfig, layer_types, ropes_of_kinds, windows_of_kinds
from ...config_fields import Fields
from ...registry import Family, Tower, register
from ...required_kernels import kernels_with_norms
from ...rope import RopeConfig
from .gemma import DEFAULTS, Gemma, gemma_config
from .gemma2 import layout, softcap


def _config(fields: Fields) -> ModelConfig:
    fields.choice("attn_logit_softcapping", None)  # which transformers does not read
    return replace(
        gemma_config(fields, windows=_windows, ropes=_ropes, qk_norm=True),
        attention_scale=fields.number("query_pre_attn_scalar") ** -0.5,
        logits_softcap=softcap(fields, "final_logit_softcapping"),
    )


def _kinds(fields: Fields, num_layers: int) -> tuple[str, ...]:
    every = fields.integer("sliding_window_pattern", 6)  # of the first files
    return layer_types(fields, num_layers) or tuple(
        SLIDING if (layer + 1) % every else FULL for layer in range(num_layers)
    )


def _windows(fields: Fields, num_layers: int) -> tuple[int | None, ...]:
    return windows_of_kinds(fields, _kinds(fields, num_layers))


def _ropes(fields: Fields, num_layers: int) -> tuple[RopeConfig, ...]:
    local = fields.number("rope_local_base_freq", above=1.0)
    return ropes_of_kinds(fields, _kinds(fields, num_layers), rope_theta=local)


_DEFAULTS = {
    **DEFAULTS,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0,
}
_TEXT_DEFAULTS = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
}

register(
    Family(
        "gemma3_text",
        ("Gemma3ForCausalLM",),
        _config,
        layout,
        Gemma.load,
        kernels=kernels_with_norms,
        defaults=_DEFAULTS,
        text_defaults=_TEXT_DEFAULTS,
    )
)
register(Tower("gemma3", ("Gemma3ForConditionalGeneration",), "gemma3_text"))
