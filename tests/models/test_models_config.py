"""Reading config.json: the four families, their variations, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from models_sizes import SIZES

from ostinato.models import UnsupportedModelError, read_config

# For the head dim of `SIZES`, 8.
LONGROPE = {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}


# What a file of each family must say, beside what all of them must.
REQUIRED: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"num_key_value_heads": 4},
    "qwen2": {"num_key_value_heads": 2},
    "qwen3": {"num_key_value_heads": 1, "head_dim": 24},
}
WINDOW = {"use_sliding_window": True, "sliding_window": 7}


def hf(family: str, **fields: Any) -> dict[str, Any]:
    return {"model_type": family, **REQUIRED[family], **SIZES, **fields}


def minimal(family: str) -> dict[str, Any]:
    sizes = {name: size for name, size in SIZES.items() if name != "num_key_value_heads"}
    return {**sizes, **REQUIRED[family]}


@pytest.mark.parametrize(
    ("scaling", "longest"),
    [
        ({"type": "linear", "factor": 4.0}, 256),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}, 128),
        ({"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32}, 64),
        ({"type": "yarn", "factor": 3.0}, 192),
        ({"type": "dynamic", "factor": 2.0}, 128),
        ({**LONGROPE, "original_max_position_embeddings": 16}, 64),
        (None, 64),
    ],
    ids=str,
)
def test_a_stretched_model_serves_longer_contexts(
    scaling: dict[str, Any] | None, longest: int
) -> None:
    config = read_config(hf("llama", max_position_embeddings=64, rope_scaling=scaling))
    assert config.context(None) == 64
    assert config.context(longest) == longest
    with pytest.raises(ValueError, match=f"max_context: got {longest + 1}, .* = {longest}"):
        config.context(longest + 1)


def test_llama_defaults() -> None:
    config = read_config(hf("llama", eos_token_id=2, torch_dtype="bfloat16"))
    assert config.head_dim == 8
    assert config.dtype == torch.bfloat16
    assert config.eos_token_ids == (2,)
    assert [config.qkv_bias, config.o_bias, config.mlp_bias, config.qk_norm] == [False] * 4
    assert config.sliding_windows == (None, None, None)


def test_attention_bias_covers_o_in_llama_but_not_in_qwen2() -> None:
    llama = read_config(hf("llama", attention_bias=True, mlp_bias=True))
    assert (llama.qkv_bias, llama.o_bias, llama.mlp_bias) == (True, True, True)
    qwen2 = read_config(hf("qwen2"))
    assert (qwen2.qkv_bias, qwen2.o_bias, qwen2.mlp_bias) == (True, False, False)


def test_qwen3_has_norms_of_q_and_k_and_its_own_head_dim() -> None:
    config = read_config(hf("qwen3", head_dim=24))
    assert config.qk_norm
    assert (config.q_size, config.kv_size) == (96, 48)


@pytest.mark.parametrize(
    ("family", "fields", "windows"),
    [
        ("mistral", {"sliding_window": 7}, (7, 7, 7)),
        ("mistral", {"sliding_window": None}, (None, None, None)),
        ("mistral", {"layer_types": ["full_attention"] * 3}, (None, None, None)),
        ("mistral", {"layer_types": ["sliding_attention"] * 3}, (7, 7, 7)),
        (
            "mistral",
            {"layer_types": ["full_attention", "sliding_attention", "sliding_attention"]},
            (None, 7, 7),
        ),
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
    assert read_config(hf(family, **{"sliding_window": 7, **fields})).sliding_windows == windows


@pytest.mark.parametrize("written", ["minimal", "by transformers"])
@pytest.mark.parametrize("extra", [{}, {**WINDOW, "max_window_layers": 1}], ids=["", "window"])
@pytest.mark.parametrize("kind", ["Llama", "Mistral", "Qwen2", "Qwen3"])
def test_defaults_are_those_of_transformers(kind: str, extra: dict[str, Any], written: str) -> None:
    family = kind.lower()
    fields = {**minimal(family), **(extra if "Qwen" in kind else {})}
    theirs = getattr(transformers, f"{kind}Config")(**fields)
    whole = written == "by transformers"
    ours = read_config(theirs.to_dict() if whole else {"model_type": family, **fields})
    assert ours.family == family
    assert ours.num_kv_heads == theirs.num_key_value_heads
    head_dim = getattr(theirs, "head_dim", None)
    assert ours.head_dim == head_dim or (head_dim is None and ours.head_dim == 8)
    assert ours.norm.eps == theirs.rms_norm_eps
    assert ours.max_position_embeddings == theirs.max_position_embeddings
    assert ours.tie_word_embeddings is theirs.tie_word_embeddings
    assert ours.o_bias is getattr(theirs, "attention_bias", False)
    assert ours.mlp_bias is getattr(theirs, "mlp_bias", False)
    assert ours.ropes[0].theta == theirs.rope_parameters["rope_theta"]
    assert ours.ropes[0].type == theirs.rope_parameters["rope_type"]
    assert ours.bos_token_id == theirs.bos_token_id
    assert ours.eos_token_ids == (() if theirs.eos_token_id is None else (theirs.eos_token_id,))
    everywhere = ["sliding_attention" if family == "mistral" else "full_attention"] * 3
    kinds = getattr(theirs, "layer_types", None) or everywhere
    windows = [theirs.sliding_window if "sliding" in k else None for k in kinds]
    assert ours.sliding_windows == tuple(windows)


@pytest.mark.parametrize(
    ("family", "name"),
    [
        *((family, name) for family in REQUIRED for name in (*minimal(family), "model_type")),
        *(("qwen3", name) for name in ("sliding_window", "max_window_layers")),
    ],
)
def test_what_has_no_common_default_must_be_written(family: str, name: str) -> None:
    config = {"model_type": family, **minimal(family)}
    if family == "qwen3":
        config |= {**WINDOW, "max_window_layers": 1}
    del config[name]
    with pytest.raises(UnsupportedModelError, match=rf"^config\.json: {name}: (got None|missing)"):
        read_config(config)


@pytest.mark.parametrize("family", REQUIRED)
def test_null_heads_are_as_many_as_query_heads(family: str) -> None:
    assert read_config(hf(family, num_key_value_heads=None)).num_kv_heads == 4


@pytest.mark.parametrize(
    ("ids", "expected"), [(None, ()), (3, (3,)), ([0, 63], (0, 63)), ([], ())], ids=str
)
def test_end_tokens_are_none_one_or_several(ids: Any, expected: tuple[int, ...]) -> None:
    assert read_config(hf("llama", eos_token_id=ids)).eos_token_ids == expected


YARN = {"type": "yarn", "factor": 4.0}
LLAMA3 = {"type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"model_type": "gpt2"}, "model_type: got 'gpt2', expected 'arcee' or"),
        ({"model_type": ["llama"]}, r"model_type: got \['llama'\], expected 'arcee'"),
        ({"architectures": ["LlamaModel"]}, r"architectures: got \['LlamaModel'\], expected \['Ll"),
        ({"architectures": "LlamaForCausalLM"}, "architectures: got 'LlamaForCausalLM', expected"),
        ({"hidden_act": "gelu"}, "hidden_act: got 'gelu', expected 'silu' or 'swish'"),
        ({"vocab_size": 0}, "vocab_size: got 0, expected an integer from 1 to"),
        ({"vocab_size": "x"}, "vocab_size: got 'x', expected an integer"),
        ({"vocab_size": 2**31}, "vocab_size: got 2147483648, expected an integer"),
        ({"hidden_size": [1]}, r"hidden_size: got \[1\], expected an integer"),
        ({"hidden_size": 32.0}, r"hidden_size: got 32\.0, expected an integer"),
        ({"num_hidden_layers": True}, "num_hidden_layers: got True, expected an integer"),
        ({"num_attention_heads": 0}, "num_attention_heads: got 0, expected an integer"),
        ({"num_attention_heads": 5}, "hidden_size: got 32, expected a multiple of num_attention_"),
        ({"num_key_value_heads": 3}, "num_heads: got 4, expected a multiple of num_kv_heads = 3"),
        ({"num_key_value_heads": 0}, "num_key_value_heads: got 0, expected an integer"),
        ({"head_dim": 0}, "head_dim: got 0, expected an integer"),
        ({"head_dim": 7}, "head_dim: got 7, expected an even number"),
        ({"partial_rotary_factor": 0.0}, "partial_rotary_factor: got 0.0, expected 1.0"),
        ({"rms_norm_eps": -1}, "rms_norm_eps: got -1, expected a finite number above 0"),
        ({"rms_norm_eps": "x"}, "rms_norm_eps: got 'x', expected a finite number"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps: got nan, expected a finite number"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps: got 10*\\.*0*, expected a finite number"),
        ({"max_position_embeddings": 1e999}, "max_position_embeddings: got inf, expected an int"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings: got 'false', expected true or f"),
        ({"attention_bias": 1}, "attention_bias: got 1, expected true or false"),
        ({"mlp_bias": []}, r"mlp_bias: got \[\], expected true or false"),
        ({"torch_dtype": "float64"}, "torch_dtype: got 'float64', expected 'bfloat16' or"),
        ({"torch_dtype": ["a"]}, r"torch_dtype: got \['a'\], expected 'bfloat16'"),
        ({"dtype": {}}, "dtype: got {}, expected 'bfloat16'"),
        ({"bos_token_id": "<s>"}, "bos_token_id: got '<s>', expected an integer from -2147"),
        ({"eos_token_id": "</s>"}, "eos_token_id: got '</s>', expected integers from 0 to 63"),
        ({"eos_token_id": 64}, "eos_token_id: got 64, expected integers from 0 to 63"),
        ({"eos_token_id": [2, -1]}, r"eos_token_id: got \[2, -1\], expected integers from 0"),
        ({"rope_theta": "x"}, "rope_theta: got 'x', expected a finite number above 1"),
        ({"rope_theta": 1.0}, "rope_theta: got 1.0, expected a finite number above 1"),
        ({"rope_scaling": "linear"}, "rope_scaling: got 'linear', expected an object"),
        ({"rope_scaling": {"type": "mrope"}}, "rope_scaling: type: got 'mrope', expected"),
        ({"rope_scaling": {"type": "longrope"}}, "rope_scaling: short_factor: got None, expected"),
        ({"rope_scaling": {**LONGROPE, "long_factor": [0.0]}}, r"long_factor: got \[0.0\], expect"),
        ({"rope_scaling": {**LONGROPE, "long_factor": [1.0]}}, "long_factor: got 1 numbers, expe"),
        ({"rope_scaling": {**LONGROPE, "short_factor": 2.0}}, "short_factor: got 2.0, expected a"),
        (
            {"rope_scaling": {**LONGROPE, "original_max_position_embeddings": 1}},
            "attention_factor: got None, expected a number where the original context is 1",
        ),
        ({"rope_scaling": {"type": "dynamic"}}, "rope_scaling: factor: got None, expected a finit"),
        (
            {
                "rope_scaling": {"type": "dynamic", "factor": 2.0},
                "original_max_position_embeddings": 99,
            },
            "original_max_position_embeddings: got 99, expected None or 256",
        ),
        ({"rope_scaling": {"rope_type": []}}, r"rope_scaling: rope_type: got \[\], expected"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling: factor: got None, expected a finite"),
        ({"rope_scaling": {**YARN, "factor": None}}, "factor: got None, expected a finite number"),
        ({"rope_parameters": {**YARN, "factor": 0}}, "rope_parameters: factor: got 0, expected a"),
        ({"rope_scaling": {**YARN, "beta_slow": 0}}, "beta_slow: got 0, expected a finite number"),
        ({"rope_scaling": {**YARN, "beta_fast": 1}}, "beta_fast: got 1, .* above 1.0"),
        ({"rope_scaling": {**YARN, "truncate": "no"}}, "truncate: got 'no', expected true or fal"),
        ({"rope_scaling": {**YARN, "attention_factor": -1}}, "attention_factor: got -1, expected"),
        (
            {"rope_scaling": {**YARN, "mscale": "a", "mscale_all_dim": 1.0}},
            "mscale: got 'a', expected a finite number",
        ),
        (
            {"rope_scaling": {**YARN, "original_max_position_embeddings": 0}},
            "original_max_position_embeddings: got 0, expected an integer",
        ),
        ({"rope_scaling": {**LLAMA3, "high_freq_factor": 1}}, "high_freq_factor: got 1, .* 1.0"),
        ({"rope_scaling": {**LLAMA3, "low_freq_factor": None}}, "low_freq_factor: got None"),
        (
            {"rope_scaling": YARN, "rope_parameters": {"factor": 2.0}},
            "rope_parameters: factor: got 2.0, expected 4.0 as in rope_scaling",
        ),
        ({"layer_types": ["chunked_attention"] * 3}, "layer_types: got .*, expected 3 times 'full"),
        ({"layer_types": ["sliding_attention"] * 3}, "layer_types: got .*, expected 3 times 'full"),
    ],
)
def test_unsupported_and_malformed_fields_are_named(fields: dict[str, Any], match: str) -> None:
    with pytest.raises(UnsupportedModelError, match=rf"^config\.json: .*{match}|^{match}"):
        read_config({**hf("llama"), **fields})


@pytest.mark.parametrize("family", ["mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("window", [0, -3, 2.5, "7", True])
def test_a_window_holds_at_least_one_key(family: str, window: Any) -> None:
    config = hf(family, **{**WINDOW, "sliding_window": window})
    with pytest.raises(UnsupportedModelError, match=f"sliding_window: got {window!r}, expected an"):
        read_config(config)


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("qwen2", {"layer_types": ["chunked_attention"] * 3}),
        ("qwen3", {**WINDOW, "layer_types": ["chunked_attention"] * 3}),
        ("qwen3", {**WINDOW, "layer_types": ["full_attention"] * 2}),
        ("qwen3", {"layer_types": ["sliding_attention"] * 3}),
        ("mistral", {"layer_types": ["full_attention"] * 2}),
        ("mistral", {"layer_types": ["chunked_attention"] * 3}),
    ],
)
def test_layer_types_are_one_per_layer_and_fit_the_window(
    family: str, fields: dict[str, Any]
) -> None:
    with pytest.raises(UnsupportedModelError, match=r"layer_types: got \[.*\], expected 3 times"):
        read_config(hf(family, **fields))


def test_layers_with_a_window_need_one() -> None:
    config = hf("mistral", sliding_window=None, layer_types=["sliding_attention"] * 3)
    with pytest.raises(UnsupportedModelError, match="sliding_window: got None, expected an integ"):
        read_config(config)


@pytest.mark.parametrize(("written", "read"), [(-1, None), (64, None), (63, 63), (0, 0)])
def test_a_first_token_that_the_model_lacks_is_none(written: int, read: int | None) -> None:
    assert read_config(hf("llama", bos_token_id=written)).bos_token_id == read


def test_the_activation_and_the_architecture_have_two_names() -> None:
    plain = read_config(hf("llama", hidden_act="silu", architectures=["LlamaForCausalLM"]))
    old = read_config(hf("llama", hidden_act="swish", architectures=["LLaMAForCausalLM"]))
    assert old == plain


def test_a_config_that_is_no_object_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match=r"^a\.json: got \[\], expected an object"):
        read_config([], "a.json")  # type: ignore[arg-type]


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("inner", [{}, {"rope_theta": 1e4}, {"llama_4_scaling_beta": 0.1}], ids=str)
def test_rope_fields_of_layer_types_are_refused(family: str, inner: dict[str, float]) -> None:
    """Such fields, of models that turn their kinds of layers in different ways, change results."""
    kinds = {
        "full_attention": {"rope_type": "default", "rope_theta": 5e5, **inner},
        "sliding_attention": inner,
    }
    for name in kinds:
        for spelling in ("rope_parameters", "rope_scaling"):
            config = {**hf(family), "head_dim": 8, spelling: {name: kinds[name]}}
            with pytest.raises(UnsupportedModelError, match=f"{spelling}: {name}: got .* not supp"):
                read_config(config)
