"""MiniMax-M2: norms over all heads, RoPE of a part of each head, and experts by sigmoids."""

from __future__ import annotations

from dataclasses import replace

from ...config import ModelConfig, full_attention, read_rope, standard_config
from ...config_fields import Fields
from ...experts.config import read_experts
from ...registry import Family, register
from ...required_kernels import kernels_with_experts
from ...rope import RopeConfig
from .mixture import MIXTRAL_NAMES, MixtureLlama, mixture_layout, with_norms_of_all_heads


def _config(fields: Fields) -> ModelConfig:
    fields.require("num_key_value_heads")
    fields.integer("head_dim")  # whose default is not hidden_size / num_attention_heads
    # Fields of the first files, which transformers does not read.
    fields.choice("scoring_func", "sigmoid", default="sigmoid")
    fields.choice("use_routing_bias", True, default=True)
    fields.choice("use_qk_norm", True, default=True)
    fields.choice("qk_norm_type", "per_layer", default="per_layer")
    fields.choice("shared_intermediate_size", 0, default=0)
    if not set(fields.integers("attn_type_list", least=0)) <= {1}:
        raise fields.wrong("attn_type_list", "1 alone, which is attention by softmax")
    config = standard_config(
        fields,
        windows=full_attention,
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        ropes=_ropes,
    )
    experts = read_experts(
        fields,
        (True,) * config.num_layers,
        size="intermediate_size",
        normalized=True,
    )
    return replace(config, experts=replace(experts, scoring="sigmoid", corrected=True))


def _ropes(fields: Fields, num_layers: int) -> tuple[RopeConfig, ...]:
    rotary_dim = fields.optional_integer("rotary_dim")
    if rotary_dim is not None:
        # The share of a head where neither of two other places has it.
        share = rotary_dim / fields.integer("head_dim")
        fields = Fields(fields.where, {"partial_rotary_factor": share, **fields.fields})
    return (read_rope(fields, partial=True),) * num_layers


_DEFAULTS = {
    "bos_token_id": 200034,
    "eos_token_id": 200020,
    "num_experts_per_tok": 8,
    "num_local_experts": 256,
    "rope_theta": 5000000.0,
}

register(
    Family(
        "minimax_m2",
        ("MiniMaxM2ForCausalLM",),
        _config,
        mixture_layout(MIXTRAL_NAMES, with_norms_of_all_heads),
        MixtureLlama.load,
        kernels=kernels_with_experts,
        defaults=_DEFAULTS,
    )
)
