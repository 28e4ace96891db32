"""GLM-4 of 2025 (0414): GLM's layer, with norms of what attention and MLP return as well."""

from __future__ import annotations

from dataclasses import replace

from ..config import ModelConfig
from ..layout import DecoderLayout
from ..registry import Family, register
from ..required_kernels import kernels_with_norms
from .glm import DEFAULTS, glm_config, glm_parts
from .llama import LayerParts, Llama, layout_of, norm_part


def layout(config: ModelConfig) -> DecoderLayout:
    """Return the parts of a decoder of this shape."""
    return layout_of(config, _layer)


def _layer(config: ModelConfig, index: int) -> LayerParts:
    prefix = f"model.layers.{index}."
    return replace(
        glm_parts(config, index),
        attention_output_norm=norm_part(config, f"{prefix}post_self_attn_layernorm"),
        mlp_output_norm=norm_part(config, f"{prefix}post_mlp_layernorm"),
    )


register(
    Family(
        "glm4",
        ("Glm4ForCausalLM",),
        glm_config,
        layout,
        Llama.load,
        kernels=kernels_with_norms,
        defaults=DEFAULTS,
    )
)
