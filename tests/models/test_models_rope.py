"""Rotary embeddings: their tables against transformers', their spellings, what is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from models_sizes import SIZES

from ostinato.models import RopeConfig, UnsupportedModelError

ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 5e5},
    "linear": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
        "rope_theta": 5e5,
    },
    "yarn": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "rope_theta": 1e6,
    },
    "yarn, all options": {
        "rope_type": "yarn",
        "factor": 2.5,
        "original_max_position_embeddings": 100,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "mscale": 0.7,
        "mscale_all_dim": 1.2,
        "truncate": False,
        "rope_theta": 1e4,
    },
    "yarn, given amplitude": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "attention_factor": 1.5,
        "rope_theta": 1e4,
    },
    "longrope": {
        "rope_type": "longrope",
        "short_factor": [1.0 + 0.1 * pair for pair in range(8)],
        "long_factor": [1.0 + 0.7 * pair for pair in range(8)],
        "original_max_position_embeddings": 64,
        "rope_theta": 1e4,
    },
    "longrope, given amplitude": {
        "rope_type": "longrope",
        "short_factor": [1.0] * 8,
        "long_factor": [2.0] * 8,
        "factor": 8.0,
        "attention_factor": 1.1,
        "original_max_position_embeddings": 128,
        "rope_theta": 1e4,
    },
    "dynamic": {"rope_type": "dynamic", "factor": 3.0, "rope_theta": 1e4},
}


# Before and behind the original contexts, and the trained one of 256.
@pytest.mark.parametrize("count", [30, 200, 400])
@pytest.mark.parametrize(
    ("name", "outer"),
    [
        *((name, {}) for name in ROPES),
        *((name, {"original_max_position_embeddings": 32}) for name in ROPES if name != "dynamic"),
    ],
    ids=str,
)
def test_rope_table_equals_that_of_transformers(
    name: str, outer: dict[str, int], count: int
) -> None:
    fields = {**outer, "rope_parameters": ROPES[name]}
    config = transformers.LlamaConfig(**SIZES, head_dim=16, **copy.deepcopy(fields))
    rotary = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)
    cos, sin = rotary(torch.zeros(1), torch.arange(count)[None])
    table = RopeConfig.from_hf(fields, 256).cos_sin_table(16, count)
    torch.testing.assert_close(table[:, :8], cos[0, :, :8], atol=4e-5, rtol=0)
    torch.testing.assert_close(table[:, 8:], sin[0, :, :8], atol=4e-5, rtol=0)


@pytest.mark.parametrize("count", [30, 200])
@pytest.mark.parametrize("name", ["default", "longrope"])
def test_the_table_of_a_part_of_a_head_is_that_of_phi3(name: str, count: int) -> None:
    rope = {**ROPES[name], "partial_rotary_factor": 0.75}
    for factors in {"short_factor", "long_factor"} & rope.keys():
        rope[factors] = rope[factors][:6]
    original = {"original_max_position_embeddings": 64}
    config = transformers.Phi3Config(
        **{**SIZES, "hidden_size": 64}, **original, rope_parameters=copy.deepcopy(rope)
    )
    rotary = transformers.models.phi3.modeling_phi3.Phi3RotaryEmbedding(config)
    cos, sin = rotary(torch.zeros(1), torch.arange(count)[None])
    read = RopeConfig.from_hf({**original, "rope_parameters": rope}, 256, partial=True)
    table = read.cos_sin_table(16, count)
    torch.testing.assert_close(table[:, :6], cos[0, :, :6], atol=2e-5, rtol=0)
    torch.testing.assert_close(table[:, 6:], sin[0, :, :6], atol=2e-5, rtol=0)


@pytest.mark.parametrize("count", [30, 400])
@pytest.mark.parametrize("spelling", ["type", "rope_type"])
def test_a_fixed_alpha_enlarges_the_base_as_in_hunyuan(spelling: str, count: int) -> None:
    """Whatever the context; the other fields are those of the files, and change nothing."""
    fields = {"rope_theta": 1e4, "alpha": 1000.0, "factor": 1.0, "beta_fast": 32, "mscale": 1.0}
    config = transformers.HunYuanDenseV1Config(
        **SIZES, head_dim=16, rope_parameters={**fields, "rope_type": "dynamic"}
    )
    rotary = (
        transformers.models.hunyuan_v1_dense.modeling_hunyuan_v1_dense
    ).HunYuanDenseV1RotaryEmbedding(config)
    cos, sin = rotary(torch.zeros(1), torch.arange(count)[None])
    read = RopeConfig.from_hf(
        {"rope_scaling": {**fields, spelling: "dynamic"}}, 256, fixed_alpha=True
    )
    table = read.cos_sin_table(16, count)
    torch.testing.assert_close(table[:, :8], cos[0, :, :8], atol=4e-5, rtol=0)
    torch.testing.assert_close(table[:, 8:], sin[0, :, :8], atol=4e-5, rtol=0)
    assert read.longest_context(256) == 256


def test_without_an_alpha_dynamic_is_what_it_is() -> None:
    fields = {**ROPES["dynamic"], "alpha": 0}
    read = RopeConfig.from_hf({"rope_parameters": fields}, 256, fixed_alpha=True)
    assert read == RopeConfig.from_hf({"rope_parameters": ROPES["dynamic"]}, 256)


def test_an_alpha_of_another_type_is_refused() -> None:
    fields = {**ROPES["yarn"], "alpha": 9.0}
    with pytest.raises(UnsupportedModelError, match=r"alpha: got 9\.0, expected None or 0"):
        RopeConfig.from_hf({"rope_parameters": fields}, 256, fixed_alpha=True)


def test_the_first_spelling_of_longrope_is_read() -> None:
    fields = {**ROPES["longrope"], "rope_type": "su"}
    assert RopeConfig.from_hf({"rope_scaling": fields}, 256).type == "longrope"


@pytest.mark.parametrize("name", ROPES)
def test_old_and_new_spelling_of_rope_agree(name: str) -> None:
    fields = dict(ROPES[name])
    new = RopeConfig.from_hf({"rope_parameters": fields}, 256)
    theta = fields.pop("rope_theta")
    old_type = {"type": fields.pop("rope_type"), **fields}
    assert RopeConfig.from_hf({"rope_theta": theta, "rope_scaling": old_type}, 256) == new


@pytest.mark.parametrize(
    "fields", [{"partial_rotary_factor": 1}, {"rope_type": "default"}], ids=str
)
def test_whole_heads_are_rotated(fields: dict[str, Any]) -> None:
    rope = RopeConfig.from_hf({**fields, "rope_parameters": fields}, 64)
    assert rope.cos_sin_table(16, 10).shape == (10, 16)


@pytest.mark.parametrize("inner", [True, False])
def test_heads_rotated_in_part_are_refused(inner: bool) -> None:
    field = {"partial_rotary_factor": 0.5}
    with pytest.raises(UnsupportedModelError, match=r"partial_rotary_factor: got 0\.5, expected"):
        RopeConfig.from_hf({"rope_parameters": field} if inner else field, 64)


@pytest.mark.parametrize("spelling", ["type", "rope_type"])
def test_two_rope_types_are_refused_however_they_are_spelt(spelling: str) -> None:
    scaling = {spelling: "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    fields = {"rope_parameters": {"rope_type": "default"}, "rope_scaling": scaling}
    with pytest.raises(UnsupportedModelError, match="rope_type: got 'default', expected 'yarn' as"):
        RopeConfig.from_hf(fields, 64)
    for same in ({"type": "yarn", "rope_theta": 1e4}, {"rope_type": None, "rope_theta": 1e4}):
        assert RopeConfig.from_hf({**fields, "rope_parameters": same}, 64).type == "yarn"
    scaling["rope_type"] = None
    scaling["type"] = "yarn"
    fields["rope_parameters"] = {"rope_type": "yarn"}
    assert RopeConfig.from_hf(fields, 64).type == "yarn"


@pytest.mark.parametrize(
    ("spelling", "extra"),
    [
        ("rope_parameters", {"llama_4_scaling_beta": 0.1}),
        ("rope_scaling", {"mrope_section": [16, 24, 24]}),
        ("rope_parameters", {"full_attention": {"rope_type": "default"}}),
    ],
)
def test_unknown_rope_fields_are_refused(spelling: str, extra: dict[str, object]) -> None:
    fields = {"rope_type": "linear", "factor": 2.0, **extra}
    (name,) = extra
    with pytest.raises(UnsupportedModelError, match=f"{spelling}: {name}: got .* not supported"):
        RopeConfig.from_hf({spelling: fields}, 4096)
