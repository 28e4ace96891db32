"""What the families other than Llama's nearest read of config.json, and what they refuse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hf_models import MODELS, TOKENS, hf_logits, random_model, save_plain
from quantized_files import FORMATS, sturdy_tokens, write_quantized

from ostinato.checkpoint import load_model, quantize_checkpoint
from ostinato.cli.build import _model_kernels
from ostinato.models import (
    DenseLinear,
    UnsupportedModelError,
    W8A8Linear,
    family_of,
    kv_format,
    read_config,
    sequence_logits,
)
from ostinato.models.parts import shard
from ostinato.ops.attention.append_kv_cuda import AppendKV
from ostinato.ops.linear.gemm_variants import GemmTiled

SIZES: dict[str, Any] = {
    "vocab_size": 200000,  # in which the tokens of all defaults are
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}
HEADS = {"num_key_value_heads": 2, "head_dim": 16}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e6,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "llama_4_scaling_beta": 0.1}
# What a file of each family must say beside its sizes, and its class of transformers.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "smollm3": ("SmolLM3", {"num_key_value_heads": 2}),
    "granite": ("Granite", {}),
    "granite_swa": ("GraniteSWA", {"num_key_value_heads": 2}),
    "glm": ("Glm", HEADS),
    "glm4": ("Glm4", HEADS),
    "helium": ("Helium", HEADS),
    "ernie4_5": ("Ernie4_5", HEADS),
    "ministral3": (
        "Ministral3",
        {**HEADS, "rope_parameters": {**YARN, "original_max_position_embeddings": 64}},
    ),
    "olmo2": ("Olmo2", {}),
    "olmo3": ("Olmo3", {}),
    "exaone4": ("Exaone4", {"num_key_value_heads": 2}),
    "internlm3": ("InternLM3", HEADS),
    "iquestcoder": ("IQuestCoder", HEADS),
    "seed_oss": ("SeedOss", HEADS),
    "ministral": ("Ministral", {"num_key_value_heads": 2}),
    "cwm": ("Cwm", {**HEADS, "rope_parameters": LLAMA3}),
    "phi3": ("Phi3", {}),
}


def fields_of(family: str, **fields: Any) -> dict[str, Any]:
    return {"model_type": family, **SIZES, **FAMILIES[family][1], **fields}


@pytest.mark.parametrize("written", ["minimal", "by transformers"])
@pytest.mark.parametrize("family", FAMILIES)
def test_defaults_are_those_of_transformers(family: str, written: str) -> None:
    kind, required = FAMILIES[family]
    theirs = getattr(transformers, f"{kind}Config")(**SIZES, **required)
    ours = read_config(theirs.to_dict() if written == "by transformers" else fields_of(family))
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.head_dim == 16
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.tie_word_embeddings is theirs.tie_word_embeddings
    assert ours.bos_token_id == theirs.bos_token_id
    ids = theirs.eos_token_id
    assert ours.eos_token_ids == (tuple(ids) if isinstance(ids, list) else (ids,))
    kinds = getattr(theirs, "layer_types", None) or ["full_attention"] * 8
    windows = [theirs.sliding_window if "sliding" in k else None for k in kinds]
    assert ours.sliding_windows == tuple(windows)
    parameters = theirs.rope_parameters
    for rope, layer in zip(ours.ropes, kinds, strict=True):
        wanted = parameters.get(layer, parameters)
        if rope is not None:
            assert (rope.type, rope.theta) == (wanted["rope_type"], wanted["rope_theta"])
            assert rope.partial_rotary_factor == wanted.get("partial_rotary_factor", 1.0)


@pytest.mark.parametrize(
    ("family", "name"), [(family, name) for family in FAMILIES for name in FAMILIES[family][1]]
)
def test_what_has_no_common_default_must_be_written(family: str, name: str) -> None:
    config = fields_of(family)
    del config[name]
    with pytest.raises(UnsupportedModelError, match=rf"^config\.json: {name}: (got None|missing)"):
        read_config(config)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_unknown_field_of_rope_is_refused_by_name(family: str) -> None:
    rope = {"rope_type": "linear", "factor": 2.0, "surprise": 1}
    if family == "olmo3":
        rope = {"full_attention": rope}
    with pytest.raises(UnsupportedModelError, match="surprise: got 1, a field that is not supp"):
        read_config(fields_of(family, rope_parameters=rope))


@pytest.mark.parametrize(
    ("family", "fields", "match"),
    [
        *((family, {"hidden_act": "gelu"}, "hidden_act: got 'gelu'") for family in FAMILIES),
        ("smollm3", {"no_rope_layers": [1, 0]}, r"no_rope_layers: got \[1, 0\], expected at least"),
        ("smollm3", {"no_rope_layers": [2] * 8}, "no_rope_layers: got .* expected integers from 0"),
        ("smollm3", {"no_rope_layer_interval": 0}, "no_rope_layer_interval: got 0, expected an"),
        ("smollm3", {"layer_types": ["sliding_attention"] * 8}, "layer_types: got"),
        ("granite", {"residual_multiplier": 0}, "residual_multiplier: got 0, expected a finite"),
        ("granite", {"logits_scaling": -1.0}, r"logits_scaling: got -1\.0, expected a finite"),
        ("granite", {"attention_multiplier": "x"}, "attention_multiplier: got 'x', expected a"),
        ("granite", {"embedding_multiplier": 0.0}, r"embedding_multiplier: got 0\.0, expected a"),
        (
            "granite_swa",
            {"layer_rope_theta": [1e4] * 7},
            "layer_rope_theta: got .* expected 8 numb",
        ),
        ("granite_swa", {"layer_rope_theta": [0.5] * 8}, "layer_rope_theta: got .* 0 or above 1"),
        ("granite_swa", {"layer_rope_theta": [-1] * 8}, "layer_rope_theta: got .* of at least 0"),
        ("granite_swa", {"layer_types": ["full_attention"]}, "layer_types: got .* 8 times"),
        ("granite_swa", {"sliding_window": None}, "sliding_window: got None, expected an integer"),
        ("glm4", {"partial_rotary_factor": 0.0}, "partial_rotary_factor: got 0.0, expected a fin"),
        ("glm4", {"partial_rotary_factor": 1.5}, "partial_rotary_factor: got 1.5, expected a fin"),
        ("glm4", {"partial_rotary_factor": 0.2}, "partial_rotary_factor: got 0.2, which rotates 3"),
        ("helium", {"partial_rotary_factor": 0.5}, "partial_rotary_factor: got 0.5, expected 1.0"),
        ("ernie4_5", {"use_bias": 1}, "use_bias: got 1, expected true or false"),
        ("helium", {"rope_parameters": YARN}, "llama_4_scaling_beta: got 0.1, a field that is not"),
        (
            "ministral3",
            {"rope_parameters": {"rope_type": "default", "llama_4_scaling_beta": 0.1}},
            "llama_4_scaling_beta: got 0.1, expected None",
        ),
        (
            "olmo3",
            {"rope_parameters": {"rope_type": "default"}},
            "rope_type: got 'default', a fiel",
        ),
        ("iquestcoder", {"clip_qkv": 8.0}, "clip_qkv: got 8.0, expected None"),
        ("iquestcoder", {"use_sliding_window": True}, "use_sliding_window: got True, expected Fal"),
        ("internlm3", {"qkv_bias": 1}, "qkv_bias: got 1, expected true or false"),
        ("internlm3", {"bias": "no"}, "bias: got 'no', expected true or false"),
        ("seed_oss", {"attention_out_bias": 0}, "attention_out_bias: got 0, expected true or fal"),
        ("ministral", {"layer_types": ["full_attention"]}, "layer_types: got .* 8 times"),
        ("cwm", {"layer_types": ["full_attention"]}, "layer_types: got .* 8 times"),
        ("cwm", {"sliding_window": 0}, "sliding_window: got 0, expected an integer from 1"),
        ("phi3", {"rope_scaling": YARN}, "llama_4_scaling_beta: got 0.1, a field that is not"),
        (
            "phi3",
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            "rope_scaling: got .*, expected the type 'default' or 'longrope'",
        ),
        (
            "phi3",
            {"rope_parameters": LLAMA3},
            "rope_parameters: got .*, expected the type 'default' or 'longrope'",
        ),
        ("phi3", {"layer_types": ["sliding_attention"] * 8}, "layer_types: got .* 8 times 'full"),
        ("exaone4", {"sliding_window_pattern": "LLLG"}, "sliding_window_pattern: got 'LLLG', expe"),
        (
            "exaone4",
            {"sliding_window": None, "layer_types": ["sliding_attention"] * 8},
            "sliding_window: got None, expected an integer, as layer_types has",
        ),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(
    family: str, fields: dict[str, Any], match: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=match):
        read_config(fields_of(family, **fields))


def test_the_old_spelling_of_rope_in_olmo3_is_read() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    old = read_config(fields_of("olmo3", rope_theta=1e5, rope_scaling=yarn))
    plain = {"rope_type": "default", "rope_theta": 1e5}
    nested = {"full_attention": {**yarn, "rope_theta": 1e5}, "sliding_attention": plain}
    assert read_config(fields_of("olmo3", rope_parameters=nested)) == old
    assert [rope.type for rope in old.ropes if rope] == (["default"] * 3 + ["yarn"]) * 2


def test_layers_without_positions_hold_no_table(tmp_path: Path) -> None:
    model = load_model(save_plain(tmp_path, random_model(MODELS["granite_swa"])))
    assert [made is None for made in model.attention.rotations] == [False, False, True]
    assert len(list(model.attention.tables())) == 2
    whole = load_model(save_plain(tmp_path / "llama", random_model(MODELS["llama"])))
    assert len(list(whole.attention.tables())) == 1


def test_short_contexts_have_short_factors_and_plain_queries(tmp_path: Path) -> None:
    """Up to the original context; there transformers does so, too, whatever is served beside."""
    hf = random_model(MODELS["ministral3"])
    folder = save_plain(tmp_path, hf)
    model = load_model(folder, max_context=8)
    assert all(made.query_cos_sin is None for made in model.attention.rotations)
    assert load_model(folder).attention.rotations[0].query_cos_sin is not None
    ours = sequence_logits(model, TOKENS[:8])
    assert (ours - hf_logits(hf, TOKENS[:8])).abs().max() <= 1e-4


@pytest.mark.parametrize("factor", [0.25, 1.6])
@pytest.mark.parametrize("form", [None, *FORMATS])
def test_logits_are_scaled_however_the_head_is_stored(
    form: str | None, factor: float, tmp_path: Path
) -> None:
    hf = random_model(MODELS["llama"])
    if form is None:
        save_plain(tmp_path, hf)
    else:
        write_quantized(tmp_path, hf, FORMATS[form])
    model = load_model(tmp_path)
    before = sequence_logits(model, TOKENS)
    model.lm_head, model.norm = model.lm_head.scaled(model.norm, factor)
    torch.testing.assert_close(sequence_logits(model, TOKENS), before * factor)


def test_a_head_with_a_bias_can_not_be_scaled() -> None:
    norm, bias = torch.ones(4), torch.ones(3)
    codes = torch.ones(3, 4, dtype=torch.int8)
    for head in (
        DenseLinear(torch.ones(3, 4), bias),
        W8A8Linear(codes, torch.ones(3), torch.float32, bias),
    ):
        with pytest.raises(ValueError, match="bias: got a tensor, expected None"):
            head.scaled(norm, 2.0)


# Models of several towers among them.
NEWER = [
    name for name in MODELS if name.split("-")[0] not in ("llama", "mistral", "qwen2", "qwen3")
]


@pytest.mark.parametrize("scheme", ["int8", "fp8"])
@pytest.mark.parametrize("name", NEWER)
def test_our_quantisers_files_equal_a_fake_quantized_twin(
    name: str, scheme: str, tmp_path: Path
) -> None:
    hf = random_model(MODELS[name])
    twin = write_quantized(tmp_path / "twin", hf, FORMATS[f"ct-{scheme}-dynamic"]).twin()
    tokens = sturdy_tokens(twin)
    quantize_checkpoint(save_plain(tmp_path / "plain", hf), tmp_path / "ours", scheme=scheme)
    ours, theirs = sequence_logits(load_model(tmp_path / "ours"), tokens), hf_logits(twin, tokens)
    assert (theirs - hf_logits(hf, tokens)).abs().max() > 0.01, "nothing was quantised"
    assert (ours - theirs).abs().max() <= 1e-4


@pytest.mark.parametrize("form", [None, "ct-int8-dynamic"])
@pytest.mark.parametrize("name", MODELS)
def test_kernels_named_ahead_are_those_of_the_model(
    name: str, form: str | None, tmp_path: Path
) -> None:
    hf = random_model(MODELS[name])
    if form is None:
        save_plain(tmp_path, hf)
    else:
        write_quantized(tmp_path, hf, FORMATS[form])
    ahead = _model_kernels(tmp_path, lm_head=None, batch_invariant=True)
    assert ahead == set(load_model(tmp_path).kernels())


@pytest.mark.parametrize(
    ("name", "form"),
    [
        *(("llama-biases", form) for form in (None, "ct-int8-dynamic", "ct-int8-with-lm-head")),
        *(("qwen3-tied", form) for form in (None, "ct-int8-dynamic")),
    ],
)
def test_kernels_named_ahead_of_16_bit_models(name: str, form: str | None, tmp_path: Path) -> None:
    hf = random_model(MODELS[name])
    if form is None:
        save_plain(tmp_path, hf, torch.bfloat16)
    else:
        write_quantized(tmp_path, hf, FORMATS[form])
        config = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    ahead = _model_kernels(tmp_path, lm_head=None, batch_invariant=True)
    assert ahead == set(load_model(tmp_path).kernels())
    outputs = {v.out_dtype for v in ahead if isinstance(v, GemmTiled)}
    assert outputs == {"bf16", "fp32"}


@pytest.mark.parametrize("asked", ["auto", "fp8", "int8", "bf16"])
@pytest.mark.parametrize("scheme", [None, "int", "float"])
def test_kernels_named_ahead_of_an_8_bit_cache(
    scheme: str | None, asked: str, tmp_path: Path
) -> None:
    write_quantized(tmp_path, random_model(MODELS["qwen3"]), FORMATS["ct-int8-dynamic"])
    config = {**json.loads((tmp_path / "config.json").read_text()), "dtype": "bfloat16"}
    if scheme is not None:
        config["quantization_config"]["kv_cache_scheme"] = {"num_bits": 8, "type": scheme}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = load_model(tmp_path)
    stored = kv_format(model.config, model.kv_scales, asked)
    how: dict[str, Any] = {"lm_head": None, "batch_invariant": True}
    ahead = _model_kernels(tmp_path, **how, kv_cache_dtype=asked)
    assert ahead == set(model.kernels(stored.dtype))
    if asked == "auto":
        assert ahead == set(model.kernels())
    names = {kernel.cache_dtype for kernel in ahead if isinstance(kernel, AppendKV)}
    by_scheme = {None: "bf16", "int": "int8", "float": "e4m3"}
    assert names == {{"auto": by_scheme[scheme], "fp8": "e4m3"}.get(asked, asked)}


def layer_of(name: str) -> Any:
    config = read_config(MODELS[name].to_dict())
    return family_of(config).layout(config).layers[0]


def test_ranks_divide_sinks_as_they_divide_heads() -> None:
    kept = [shard(layer_of("granite_swa"), rank, 2).sinks.kept_rows for rank in range(2)]
    assert kept == [slice(0, 2), slice(2, 4)]


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("olmo2", r"q_norm\.weight: got 2 ranks, expected 1 for a norm over all heads"),
        ("glm4", r"gate_up_proj: got 1 for 2 ranks, expected a multiple"),
        ("phi3", r"qkv_proj: got 1 for 2 ranks, expected a multiple"),
    ],
)
def test_what_ranks_can_not_divide_is_refused(name: str, match: str) -> None:
    layer = layer_of(name)
    assert shard(layer, 0, 1) is not None
    with pytest.raises(UnsupportedModelError, match=match):
        shard(layer, 0, 2)
