"""HunYuan (dense): Llama's layer, with norms of each head of q and k after RoPE."""

from __future__ import annotations

from dataclasses import replace

from ..config import LLAMA_IDS, ModelConfig, full_attention, same_rope, standard_config
from ..config_fields import Fields
from ..layout import DecoderLayout
from ..registry import Family, register
from .llama import LayerParts, Llama, layer_parts, layout_of, norm_part


def layout(config: ModelConfig) -> DecoderLayout:
    """Return the parts of a decoder of this shape."""
    return layout_of(config, normed_layer)


def normed_layer(config: ModelConfig, index: int) -> LayerParts:
    """Return the parts of a layer."""
    prefix, shape = f"model.layers.{index}.self_attn.", (config.head_dim,)
    return replace(
        layer_parts(config, index),
        q_norm=norm_part(config, f"{prefix}query_layernorm", shape),
        k_norm=norm_part(config, f"{prefix}key_layernorm", shape),
    )


def hunyuan_config(fields: Fields) -> ModelConfig:
    """Return the shape of HunYuan's decoder, but for what it may have instead of MLPs."""
    fields.integer("head_dim")  # which transformers does not derive
    # Fields of the first files, which transformers does not read.
    fields.choice("use_cla", False, default=False)
    fields.choice("use_qk_norm", True, default=True)
    bias = fields.boolean("attention_bias", False)
    config = standard_config(
        fields,
        windows=full_attention,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=False,
        ropes=same_rope(fixed_alpha=True),
    )
    return replace(config, qk_norm_after_rope=True)


DEFAULTS = {**LLAMA_IDS, "rms_norm_eps": 1e-5}

register(
    Family(
        "hunyuan_v1_dense",
        ("HunYuanDenseV1ForCausalLM",),
        hunyuan_config,
        layout,
        Llama.load,
        defaults=DEFAULTS,
    )
)
