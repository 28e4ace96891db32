"""ERNIE 4.5 with experts: the dense models' attention, softmax scores with a bias for choosing."""

from __future__ import annotations

from dataclasses import replace

from ...config import ModelConfig
from ...config_fields import Fields
from ...experts.config import read_experts
from ...registry import Family, register
from ...required_kernels import kernels_with_experts
from ..ernie4_5 import DEFAULTS, ernie_config
from .mixture import ExpertNames, MixtureLlama, mixture_layout


def _layers(fields: Fields, num_layers: int) -> tuple[bool, ...]:
    """Return which layers have a mixture: some of those from the first to the last."""
    first = fields.integer("moe_layer_start_index", 1, least=0)
    last = fields.integer("moe_layer_end_index", -1, least=-1)
    interval = fields.integer("moe_layer_interval", 1)
    end = num_layers - 1 if last == -1 else last
    return tuple(
        first <= layer <= end and (layer + 1) % interval == 0 for layer in range(num_layers)
    )


def _config(fields: Fields) -> ModelConfig:
    fields.choice("use_bias", False, default=False)  # which the output projection would have, too
    config = ernie_config(fields)
    # Below it scores would be divided by more than their sum.
    fields.number("moe_norm_min", 1e-12, most=1e-9)
    experts = read_experts(
        fields,
        _layers(fields, config.num_layers),
        count="moe_num_experts",
        chosen="moe_k",
        normalized=True,
    )
    shared = fields.integer("moe_num_shared_experts", 2, least=0) * experts.intermediate_size
    return replace(config, experts=replace(experts, corrected=True, shared_size=shared))


register(
    Family(
        "ernie4_5_moe",
        ("Ernie4_5_MoeForCausalLM",),
        _config,
        mixture_layout(ExpertNames(correction="moe_statics.e_score_correction_bias")),
        MixtureLlama.load,
        kernels=kernels_with_experts,
        defaults={**DEFAULTS, "moe_intermediate_size": 1536, "moe_k": 6, "moe_num_experts": 64},
    )
)
