"""HunYuan (A13B): the dense models' attention, and mixtures beside an MLP that all tokens share."""

from __future__ import annotations

from dataclasses import replace

from ...config import ModelConfig
from ...config_fields import Fields
from ...experts.config import read_experts
from ...registry import Family, register
from ...required_kernels import kernels_with_experts
from ..hunyuan_v1_dense import DEFAULTS, hunyuan_config, normed_layer
from .mixture import ExpertNames, MixtureLlama, mixture_layout

_OF_LAYERS = ("num_experts", "moe_topk", "moe_intermediate_size", "num_shared_expert")


def _written_once(fields: Fields) -> Fields:
    """Return fields with one number where files may have one for each layer."""
    once: dict[str, int] = {}
    for name in _OF_LAYERS:
        values = fields.integers(name)
        if len(set(values)) > 1:
            raise fields.wrong(name, "an integer from 1 on, the same in all layers")
        if values:
            once[name] = values[0]
    return Fields(fields.where, {**fields.fields, **once})


def _config(fields: Fields) -> ModelConfig:
    config, once = hunyuan_config(fields), _written_once(fields)
    size = config.intermediate_size
    # Fields of the first files, which transformers does not read.
    fields.choice("use_mixed_mlp_moe", True, default=True)
    for name, only in (("moe_intermediate_size", size), ("num_shared_expert", 1)):
        if once.integer(name, only) != only:
            raise fields.wrong(name, f"{only} in all layers")
    experts = read_experts(
        once,
        (True,) * config.num_layers,
        count="num_experts",
        chosen="moe_topk",
        size="intermediate_size",
        normalized=True,
    )
    return replace(config, experts=replace(experts, shared_size=size))


register(
    Family(
        "hunyuan_v1_moe",
        ("HunYuanMoEV1ForCausalLM",),
        _config,
        mixture_layout(ExpertNames(router="gate.wg", shared="shared_mlp"), normed_layer),
        MixtureLlama.load,
        kernels=kernels_with_experts,
        defaults={**DEFAULTS, "moe_topk": 1, "num_experts": 1},
    )
)
