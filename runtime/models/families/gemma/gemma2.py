"""Gemma 2: Gemma with norms before and after attention and MLP, windows, and capped logits."""

from __future__ import annotations

from dataclasses import replace

from ...config import FULL, SLIDING, ModelConfig, layer_types, windows_of_kinds
from ...config_fields import Fields
from ...layout import DecoderLayout
from ...registry import Family, register
from ...required_kernels import kernels_with_norms
from ..llama import LayerParts, layer_parts, layout_of, norm_part
from .gemma import DEFAULTS, Gemma, gemma_config


def layout(config: ModelConfig) -> DecoderLayout:
    """Return the parts of a decoder of this shape."""
    return layout_of(config, _layer)


def _layer(config: ModelConfig, index: int) -> LayerParts:
    prefix = f"model.layers.{index}."
    return replace(
        layer_parts(config, index),
        attention_output_norm=norm_part(config, f"{prefix}post_attention_layernorm"),
        post_attention_norm=norm_part(config, f"{prefix}pre_feedforward_layernorm"),
        mlp_output_norm=norm_part(config, f"{prefix}post_feedforward_layernorm"),
    )


def softcap(fields: Fields, name: str) -> float:
    """Return a cap of logits, 0 where a file has none.

    Raises:
        UnsupportedModelError: naming the field.
    """
    return 0.0 if fields.get(name) is None else fields.number(name)


def _config(fields: Fields) -> ModelConfig:
    return replace(
        gemma_config(fields, windows=_windows),
        attention_scale=fields.number("query_pre_attn_scalar") ** -0.5,
        attention_softcap=softcap(fields, "attn_logit_softcapping"),
        logits_softcap=softcap(fields, "final_logit_softcapping"),
    )


def _windows(fields: Fields, num_layers: int) -> tuple[int | None, ...]:
    kinds = layer_types(fields, num_layers) or tuple(
        FULL if layer % 2 else SLIDING for layer in range(num_layers)
    )
    return windows_of_kinds(fields, kinds)


_DEFAULTS = {
    **DEFAULTS,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}

register(
    Family(
        "gemma2",
        ("Gemma2ForCausalLM",),
        _config,
        layout,
        Gemma.load,
        kernels=kernels_with_norms,
        defaults=_DEFAULTS,
    )
)
