"""Qwen2-MoE and Qwen1.5-MoE: Qwen2's attention, and a shared expert with a gate beside others."""

from __future__ import annotations

from dataclasses import replace

from ...config import (
    FULL,
    SLIDING,
    ModelConfig,
    layer_types,
    standard_config,
    windows_of_kinds,
)
from ...config_fields import Fields
from ...experts.config import read_experts, sparse_layers
from ...registry import Family, register
from ...required_kernels import kernels_with_experts
from .mixture import ExpertNames, MixtureLlama, mixture_layout


def _config(fields: Fields) -> ModelConfig:
    fields.require("num_key_value_heads")
    config = standard_config(
        fields,
        windows=_windows,
        qkv_bias=fields.boolean("qkv_bias", True),
        o_bias=False,
        mlp_bias=False,
    )
    experts = replace(
        read_experts(fields, sparse_layers(fields, config.num_layers)),
        shared_size=fields.integer("shared_expert_intermediate_size"),
        shared_gate=True,
    )
    return replace(config, experts=experts)


def _windows(fields: Fields, num_layers: int) -> tuple[int | None, ...]:
    slides = fields.boolean("use_sliding_window", False)
    kinds = layer_types(fields, num_layers)
    if not kinds:
        last = fields.integer("max_window_layers", 28, least=0) if slides else 0
        kinds = tuple(
            SLIDING if layer % 2 == 0 and layer < last else FULL for layer in range(num_layers)
        )
    if not slides and SLIDING in kinds:
        raise fields.wrong("layer_types", f"{num_layers} times {FULL!r} without use_sliding_window")
    return windows_of_kinds(fields, kinds)


register(
    Family(
        "qwen2_moe",
        ("Qwen2MoeForCausalLM",),
        _config,
        mixture_layout(ExpertNames(shared="shared_expert")),
        MixtureLlama.load,
        kernels=kernels_with_experts,
        defaults={"sliding_window": 4096},
    )
)
