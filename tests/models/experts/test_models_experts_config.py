"""Defaults of families with experts are those of transformers; what has none must be written."""

from __future__ import annotations

from typing import Any

import pytest
import transformers

from ostinato.models import ModelConfig, UnsupportedModelError, read_config
from ostinato.models.experts.config import ExpertsConfig

SIZES: dict[str, Any] = {
    "vocab_size": 256000,  # in which the tokens of all defaults are
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}
KV = {"num_key_value_heads": 2}
CHOICE = {"num_experts_per_tok": 3, "moe_intermediate_size": 24}
# What a file of each family must say beside its sizes, and its class of transformers.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("Qwen3Moe", {**KV, **CHOICE, "num_experts": 8, "norm_topk_prob": False}),
    "qwen2_moe": (
        "Qwen2Moe",
        {**KV, **CHOICE, "num_experts": 8, "shared_expert_intermediate_size": 40},
    ),
    "mixtral": ("Mixtral", KV),
    "olmoe": ("Olmoe", {}),
    "granitemoe": ("GraniteMoe", {}),
    "glm4_moe": ("Glm4Moe", {**KV, **CHOICE, "n_routed_experts": 8}),
    "minimax_m2": ("MiniMaxM2", {**KV, "head_dim": 16}),
    "dots1": (
        "Dots1",
        {**KV, **CHOICE, "n_routed_experts": 8, "n_shared_experts": 1, "norm_topk_prob": True},
    ),
    "ernie4_5_moe": ("Ernie4_5_Moe", KV),
    "hunyuan_v1_moe": ("HunYuanMoEV1", {"head_dim": 16}),
}
# Beside those of `FAMILIES`: in transformers its default is no quotient of sizes.
ALSO_WRITTEN = {"qwen3_moe": {"head_dim": 16}}


def fields_of(family: str) -> dict[str, Any]:
    own = {**FAMILIES[family][1], **ALSO_WRITTEN.get(family, {})}
    return {"model_type": family, **SIZES, **own}


def theirs_of(family: str) -> Any:
    return getattr(transformers, f"{FAMILIES[family][0]}Config")(
        **{**SIZES, **FAMILIES[family][1], **ALSO_WRITTEN.get(family, {})}
    )


@pytest.mark.parametrize("written", ["minimal", "by transformers"])
@pytest.mark.parametrize("family", FAMILIES)
def test_defaults_are_those_of_transformers(family: str, written: str) -> None:
    theirs = theirs_of(family)
    ours = read_config(fields_of(family) if written == "minimal" else theirs.to_dict())
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.head_dim == 16
    assert ours.norm.eps == theirs.rms_norm_eps
    assert (ours.bos_token_id, ours.tie_word_embeddings) == (
        theirs.bos_token_id,
        theirs.tie_word_embeddings,
    )
    end = theirs.eos_token_id
    assert ours.eos_token_ids == (() if end is None else (end,))
    (rope,) = ours.rotations
    wanted = theirs.rope_parameters
    assert (rope.type, rope.theta) == (wanted["rope_type"], wanted["rope_theta"])
    assert rope.partial_rotary_factor == wanted.get("partial_rotary_factor", 1.0)
    assert_routed_alike(ours, theirs)


def assert_routed_alike(ours: ModelConfig, theirs: Any) -> None:
    experts = ours.experts
    assert isinstance(experts, ExpertsConfig)
    counts = ("n_routed_experts", "num_experts", "num_local_experts")
    assert experts.num_experts == next(getattr(theirs, n) for n in counts if hasattr(theirs, n))
    assert experts.top_k == theirs.num_experts_per_tok
    size = getattr(theirs, "moe_intermediate_size", theirs.intermediate_size)
    assert experts.intermediate_size == size
    assert experts.normalized == getattr(theirs, "norm_topk_prob", True)
    assert experts.scale == getattr(theirs, "routed_scaling_factor", 1.0)
    assert experts.num_groups == getattr(theirs, "n_group", 1)
    dense = getattr(theirs, "moe_layer_start_index", 0)
    first = getattr(theirs, "first_k_dense_replace", dense)
    assert experts.layers == tuple(layer >= first for layer in range(3))
    # HunYuan has one, and no field for it.
    count = 1 if theirs.model_type == "hunyuan_v1_moe" else 0
    count = getattr(theirs, "moe_num_shared_experts", count)
    shared = getattr(theirs, "n_shared_experts", count) * size
    assert experts.shared_size == getattr(theirs, "shared_expert_intermediate_size", shared)


@pytest.mark.parametrize(
    ("family", "name"),
    [
        (family, name)
        for family in FAMILIES
        for name in fields_of(family)
        if name not in (*SIZES, "model_type")
    ],
)
def test_what_has_no_common_default_must_be_written(family: str, name: str) -> None:
    fields = fields_of(family)
    del fields[name]
    with pytest.raises(UnsupportedModelError, match=rf"^config\.json: {name}: (got None|missing)"):
        read_config(fields)


@pytest.mark.parametrize("family", FAMILIES)
def test_another_activation_is_refused(family: str) -> None:
    with pytest.raises(UnsupportedModelError, match="hidden_act: got 'tanh', expected 'silu'"):
        read_config({**fields_of(family), "hidden_act": "tanh"})
