"""Reading config.json: the four families, their variations, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from ostinato.model import ModelConfig, RopeConfig, UnsupportedModelError

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
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
}


def hf(family: str, **fields: Any) -> dict[str, Any]:
    return {"model_type": family, **SIZES, **fields}


@pytest.mark.parametrize("name", ROPES)
def test_rope_table_equals_that_of_transformers(name: str) -> None:
    config = transformers.LlamaConfig(**SIZES, head_dim=16, rope_parameters=dict(ROPES[name]))
    rotary = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)
    cos, sin = rotary(torch.zeros(1), torch.arange(200)[None])
    table = RopeConfig.from_hf({"rope_parameters": ROPES[name]}, 256).cos_sin_table(16, 200)
    torch.testing.assert_close(table[:, :8], cos[0, :, :8], atol=2e-5, rtol=0)
    torch.testing.assert_close(table[:, 8:], sin[0, :, :8], atol=2e-5, rtol=0)


@pytest.mark.parametrize("name", ROPES)
def test_old_and_new_spelling_of_rope_agree(name: str) -> None:
    fields = dict(ROPES[name])
    new = RopeConfig.from_hf({"rope_parameters": fields}, 256)
    theta = fields.pop("rope_theta")
    old_type = {"type": fields.pop("rope_type"), **fields}
    assert RopeConfig.from_hf({"rope_theta": theta, "rope_scaling": old_type}, 256) == new


def test_partial_rotary_dimension() -> None:
    rope = RopeConfig.from_hf({"partial_rotary_factor": 0.5}, 64)
    assert rope.cos_sin_table(16, 10).shape == (10, 8)


def test_llama_defaults() -> None:
    config = ModelConfig.from_hf(hf("llama", eos_token_id=2, torch_dtype="bfloat16"))
    assert config.head_dim == 8
    assert config.dtype == torch.bfloat16
    assert config.eos_token_ids == (2,)
    assert [config.qkv_bias, config.o_bias, config.mlp_bias, config.qk_norm] == [False] * 4
    assert config.sliding_windows == (None, None, None)


def test_attention_bias_of_llama_covers_the_output_projection_but_not_in_qwen2() -> None:
    llama = ModelConfig.from_hf(hf("llama", attention_bias=True, mlp_bias=True))
    assert (llama.qkv_bias, llama.o_bias, llama.mlp_bias) == (True, True, True)
    qwen2 = ModelConfig.from_hf(hf("qwen2"))
    assert (qwen2.qkv_bias, qwen2.o_bias, qwen2.mlp_bias) == (True, False, False)


def test_qwen3_has_norms_of_q_and_k_and_its_own_head_dim() -> None:
    config = ModelConfig.from_hf(hf("qwen3", head_dim=24))
    assert config.qk_norm
    assert (config.q_size, config.kv_size) == (96, 48)


@pytest.mark.parametrize(
    ("family", "fields", "windows"),
    [
        ("mistral", {"sliding_window": 7}, (7, 7, 7)),
        ("mistral", {"sliding_window": None}, (None, None, None)),
        ("qwen2", {"sliding_window": 7, "use_sliding_window": False}, (None, None, None)),
        (
            "qwen2",
            {"sliding_window": 7, "use_sliding_window": True, "max_window_layers": 1},
            (None, 7, 7),
        ),
        (
            "qwen3",
            {
                "sliding_window": 7,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
            (7, None, 7),
        ),
    ],
)
def test_sliding_windows(
    family: str, fields: dict[str, Any], windows: tuple[int | None, ...]
) -> None:
    assert ModelConfig.from_hf(hf(family, **fields)).sliding_windows == windows


@pytest.mark.parametrize("kind", ["Llama", "Mistral", "Qwen2", "Qwen3"])
def test_config_of_transformers_is_read(kind: str) -> None:
    config = getattr(transformers, f"{kind}Config")(**SIZES).to_dict()
    read = ModelConfig.from_hf(config)
    assert read.family == kind.lower()
    assert (read.num_heads, read.num_kv_heads, read.vocab_size) == (4, 2, 64)


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"model_type": "gpt2"}, "model_type: got 'gpt2', expected one of llama, mistral"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "architectures: got 'LlamaForSe"),
        ({"hidden_act": "gelu"}, "hidden_act: got 'gelu', expected 'silu'"),
        ({"rope_scaling": {"type": "longrope"}}, "rope scaling: got type 'longrope'"),
        ({"rope_scaling": {"type": "linear"}}, "type 'linear' needs a 'factor'"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"num_key_value_heads": 3}, "num_heads: got 4, expected a multiple of num_kv_heads = 3"),
        ({"vocab_size": 0}, "vocab_size: got 0, expected at least 1"),
        ({"torch_dtype": "float64"}, "dtype: got 'float64'"),
    ],
)
def test_unsupported_fields_are_named(fields: dict[str, Any], match: str) -> None:
    with pytest.raises(UnsupportedModelError, match=match):
        ModelConfig.from_hf({**hf("llama"), **fields})
