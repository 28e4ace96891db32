"""GLM-4.5 to 4.7: RoPE of half of each head, experts by sigmoids, and one that all tokens share."""

from __future__ import annotations

from dataclasses import replace

from ...config import ModelConfig, full_attention, same_rope, standard_config
from ...config_fields import Fields
from ...experts.config import ExpertsConfig, layers_from, read_experts
from ...layout import DecoderLayout
from ...registry import Family, register
from ...required_kernels import kernels_with_experts
from .mixture import ExpertNames, MixtureLlama, mixture_layout

_layout = mixture_layout(ExpertNames())


def _without_predictors(config: ModelConfig) -> DecoderLayout:
    """Return the parts of a decoder without layers that predict further tokens.

    Files have such behind the last layer of the decoder.
    """
    return replace(_layout(config), unused=(f"model.layers.{config.num_layers}.",))


def deepseek_experts(fields: Fields, num_layers: int) -> ExpertsConfig:
    """Return the mixtures of DeepSeek-V3's kind: sigmoids, a correction, groups, a shared expert.

    Args:
        fields: of config.json, with the family's defaults.
        num_layers: of the model.

    Raises:
        UnsupportedModelError: naming the field.
    """
    fields.choice("scoring_func", "sigmoid", default="sigmoid")
    fields.choice("topk_method", "noaux_tc", default="noaux_tc")
    fields.choice("moe_layer_freq", 1, default=1)
    config = read_experts(fields, layers_from(fields, num_layers), count="n_routed_experts")
    groups = fields.integer("n_group", 1, most=config.num_experts)
    return replace(
        config,
        scoring="sigmoid",
        corrected=True,
        scale=fields.number("routed_scaling_factor", 1.0),
        num_groups=groups,
        top_groups=fields.integer("topk_group", 1, most=groups),
        shared_size=fields.integer("n_shared_experts") * config.intermediate_size,
    )


def _config(fields: Fields) -> ModelConfig:
    fields.require("num_key_value_heads")
    config = standard_config(
        fields,
        windows=full_attention,
        qkv_bias=fields.boolean("attention_bias", False),
        o_bias=False,
        mlp_bias=False,
        qk_norm=fields.boolean("use_qk_norm", False),
        ropes=same_rope(partial=True),
    )
    return replace(config, experts=deepseek_experts(fields, config.num_layers))


_DEFAULTS = {
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-5,
}

register(
    Family(
        "glm4_moe",
        ("Glm4MoeForCausalLM",),
        _config,
        _without_predictors,
        MixtureLlama.load,
        kernels=kernels_with_experts,
        defaults=_DEFAULTS,
    )
)
