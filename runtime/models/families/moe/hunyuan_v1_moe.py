"""HunYuan (A13B): the dense models' attention, and mixtures beside an MLP that all tokens share."""

from __future__ import annotations

from dataclasses import replace

from ....ops.moe.route import MOST_EXPERTS, MOST_TOP_K
from ...config import LLAMA_IDS, ModelConfig
from ...config_fields import Fields
from ...experts.config import ExpertsConfig
from ...registry import Family, register
from ...required_kernels import kernels_with_experts
from ..hunyuan_v1_dense import hunyuan_config, normed_layer
from .mixture import ExpertNames, MixtureLlama, mixture_layout


def _same(fields: Fields, name: str, default: int, most: int) -> int:
    """Return a number that may be written once, or for each layer."""
    values = fields.integers(name, most=most) or (default,)
    if len(set(values)) != 1:
        raise fields.wrong(name, f"an integer from 1 to {most}, the same in all layers")
    return values[0]


def _config(fields: Fields) -> ModelConfig:
    config = hunyuan_config(fields)
    size = config.intermediate_size
    # Fields of the first files, which transformers does not read.
    fields.choice("use_mixed_mlp_moe", True, default=True)
    for name, only in (("moe_intermediate_size", size), ("num_shared_expert", 1)):
        if _same(fields, name, only, max(only, 1 << 20)) != only:
            raise fields.wrong(name, f"{only} in all layers")
    num_experts = _same(fields, "num_experts", 1, MOST_EXPERTS)
    experts = ExpertsConfig(
        num_experts=num_experts,
        top_k=_same(fields, "moe_topk", 1, min(num_experts, MOST_TOP_K)),
        intermediate_size=size,
        layers=(True,) * config.num_layers,
        shared_size=size,
    )
    return replace(config, experts=experts)


register(
    Family(
        "hunyuan_v1_moe",
        ("HunYuanMoEV1ForCausalLM",),
        _config,
        mixture_layout(ExpertNames(router="gate.wg", shared="shared_mlp"), normed_layer),
        MixtureLlama.load,
        kernels=kernels_with_experts,
        defaults={**LLAMA_IDS, "rms_norm_eps": 1e-5},
    )
)
