"""What the families other than Llama's nearest read of config.json, and what they refuse."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hf_experts import WITH_EXPERTS
from hf_models import MODELS, SHAPE, TOKENS, hf_logits, random_model, save_plain
from quantized_files import FORMATS, sturdy_tokens, write_quantized
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config

from ostinato.checkpoint import CheckpointError, load_model, quantize_checkpoint
from ostinato.checkpoint.load import CheckpointLoader
from ostinato.checkpoint.quantization import load_quantization
from ostinato.checkpoint.reader import CheckpointReader
from ostinato.checkpoint.storage.base import Target
from ostinato.cli.build import _model_kernels
from ostinato.models import (
    DenseLinear,
    ScaleKind,
    UnsupportedModelError,
    W8A8Linear,
    family_of,
    kv_format,
    read_config,
    sequence_logits,
)
from ostinato.models.layout import shard
from ostinato.ops.attention.append_kv_cuda import AppendKV
from ostinato.ops.attention.dequantize_kv import DequantizeKV
from ostinato.ops.attention.prefill_variants import AttentionPrefill
from ostinato.ops.linear.gemm_variants import GemmTiled
from ostinato.ops.linear.quantize_cuda import NORMS, Quantize

SIZES: dict[str, Any] = {
    "vocab_size": 256000,  # in which the tokens of all defaults are
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
    "nemotron": ("Nemotron", {"num_key_value_heads": 2}),
    "arcee": ("Arcee", {}),
    "jais2": ("Jais2", {}),
    "starcoder2": ("Starcoder2", {"num_key_value_heads": 2}),
    "stablelm": ("StableLm", {"num_key_value_heads": 2}),
    "cohere": ("Cohere", {}),
    "cohere2": ("Cohere2", {}),
    "phi": ("Phi", {}),
    "hunyuan_v1_dense": ("HunYuanDenseV1", {"head_dim": 16}),
    "gemma": ("Gemma", HEADS),
    "gemma2": ("Gemma2", HEADS),
    "gemma3_text": ("Gemma3Text", HEADS),
}
# Names of the numbers beside the mean of squares.
EPS = ("rms_norm_eps", "layer_norm_eps", "norm_eps", "norm_epsilon")


# Those of Gemma 2 and 3 read another field.
OF_HIDDEN_ACT = [family for family in FAMILIES if family not in ("gemma2", "gemma3_text")]


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
    assert [ours.norm.eps] == [getattr(theirs, name) for name in EPS if hasattr(theirs, name)]
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
    if family in ("olmo3", "gemma3_text"):
        rope = {"full_attention": rope}
    with pytest.raises(UnsupportedModelError, match="surprise: got 1, a field that is not supp"):
        read_config(fields_of(family, rope_parameters=rope))


@pytest.mark.parametrize(
    ("family", "fields", "match"),
    [
        *((family, {"hidden_act": "tanh"}, "hidden_act: got 'tanh'") for family in OF_HIDDEN_ACT),
        ("smollm3", {"hidden_act": "gelu"}, "hidden_act: got 'gelu', expected 'silu' or 'swish'"),
        ("nemotron", {"hidden_act": "silu"}, "hidden_act: got 'silu', expected 'relu2'"),
        ("nemotron", {"norm_eps": 0}, "norm_eps: got 0, expected a finite number above 0"),
        ("nemotron", {"num_key_value_heads": None}, "num_key_value_heads: got None"),
        ("nemotron", {"mlp_bias": 1}, "mlp_bias: got 1, expected true or false"),
        ("arcee", {"attention_bias": "yes"}, "attention_bias: got 'yes', expected true or false"),
        ("arcee", {"partial_rotary_factor": 0.5}, "partial_rotary_factor: got 0.5, expected 1.0"),
        ("jais2", {"layer_norm_eps": -1.0}, "layer_norm_eps: got -1.0, expected a finite"),
        ("starcoder2", {"use_bias": 0}, "use_bias: got 0, expected true or false"),
        ("starcoder2", {"sliding_window": 0}, "sliding_window: got 0, expected an integer from 1"),
        ("starcoder2", {"norm_epsilon": "x"}, "norm_epsilon: got 'x', expected a finite number"),
        ("stablelm", {"qk_layernorm": 1}, "qk_layernorm: got 1, expected true or false"),
        ("stablelm", {"use_parallel_residual": 1}, "use_parallel_residual: got 1, expected true"),
        ("stablelm", {"partial_rotary_factor": 0.1}, "partial_rotary_factor: got 0.1, which rotat"),
        ("cohere", {"logit_scale": 0.0}, "logit_scale: got 0.0, expected a finite number above 0"),
        ("cohere", {"use_qk_norm": "no"}, "use_qk_norm: got 'no', expected true or false"),
        ("cohere", {"use_parallel_block": False}, "use_parallel_block: got False, expected True"),
        ("cohere2", {"use_gated_activation": False}, "use_gated_activation: got False, expected"),
        ("cohere2", {"use_qk_norm": True}, "use_qk_norm: got True, expected False"),
        ("cohere2", {"sliding_window_pattern": 0}, "sliding_window_pattern: got 0, expected an"),
        ("cohere2", {"layer_types": ["full_attention"]}, "layer_types: got .* 8 times"),
        ("cohere2", {"sliding_window": "x"}, "sliding_window: got 'x', expected an integer"),
        ("phi", {"qk_layernorm": True}, "qk_layernorm: got True, expected False"),
        ("phi", {"tie_word_embeddings": True}, "tie_word_embeddings: got True, expected False"),
        ("gemma", {"hidden_activation": "gelu"}, "hidden_activation: got 'gelu', expected None or"),
        ("gemma", {"use_bidirectional_attention": True}, "use_bidirectional_attention: got True"),
        ("gemma2", {"hidden_activation": "gelu"}, "hidden_activation: got 'gelu', expected 'gelu_"),
        ("gemma2", {"final_logit_softcapping": 0}, "final_logit_softcapping: got 0, expected a fi"),
        ("gemma2", {"attn_logit_softcapping": "x"}, "attn_logit_softcapping: got 'x', expected a"),
        ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar: got 0, expected a finite"),
        ("gemma2", {"layer_types": ["full_attention"]}, "layer_types: got .* 8 times"),
        ("gemma2", {"sliding_window": None}, "sliding_window: got None, expected an integer"),
        ("gemma3_text", {"hidden_activation": "silu"}, "hidden_activation: got 'silu', expected"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping: got 50.0, expe"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention: got"),
        ("gemma3_text", {"rope_local_base_freq": 1}, "rope_local_base_freq: got 1, expected a fin"),
        ("gemma3_text", {"sliding_window_pattern": 0}, "sliding_window_pattern: got 0, expected"),
        (
            "gemma3_text",
            {"rope_parameters": {"rope_type": "linear", "factor": 8.0}},
            "rope_parameters: rope_type: got 'linear', a field that is not supported",
        ),
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
        ("hunyuan_v1_dense", {"use_cla": True}, "use_cla: got True, expected False"),
        ("hunyuan_v1_dense", {"use_qk_norm": False}, "use_qk_norm: got False, expected True"),
        (
            "hunyuan_v1_dense",
            {"rope_scaling": {"type": "dynamic", "alpha": -1.0}},
            r"alpha: got -1\.0, expected a finite number above 0",
        ),
        (
            "hunyuan_v1_dense",
            {"head_dim": 2, "rope_scaling": {"type": "dynamic", "alpha": 9.0}},
            "partial_rotary_factor: got 1.0, which rotates 2 of 2 elements, expected an even numb",
        ),
        ("internlm3", {"rope_scaling": {"type": "dynamic", "alpha": 9.0}}, "alpha: got 9.0, a fie"),
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
@pytest.mark.parametrize("name", [name for name in NEWER if name not in WITH_EXPERTS])
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


NORM_KERNELS = {"nemotron": ("layer_norm", "fp32"), "cohere-qk-norm": ("layer_norm", "bf16")}


@pytest.mark.parametrize(
    ("name", "form"),
    [
        *(("llama-biases", form) for form in (None, "ct-int8-dynamic", "ct-int8-with-lm-head")),
        *(("qwen3-tied", form) for form in (None, "ct-int8-dynamic")),
        *(("nemotron", form) for form in (None, "ct-int8-dynamic", "ct-fp8-dynamic")),
        *(("cohere-qk-norm", form) for form in (None, "ct-int8-dynamic")),
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
    norms = {(v.kind, v.weight_dtype) for v in ahead if isinstance(v, Quantize) and v.kind in NORMS}
    # A weight that is stored less 1 is in fp32.
    assert norms == {NORM_KERNELS.get(name, ("rms_norm", "bf16"))}


def test_weights_stored_less_1_are_added_up_in_fp32(tmp_path: Path) -> None:
    hf = random_model(MODELS["nemotron"])
    stored = torch.full((32,), 2.0**-9 + 2.0**-12)  # which 1 + w in bf16 would round off
    hf.model.norm.weight.data = stored.clone()
    norm = load_model(save_plain(tmp_path, hf, torch.bfloat16)).norm
    assert norm.weight.dtype is norm.bias.dtype is torch.float32
    assert torch.equal(norm.weight, 1 + stored)
    assert torch.equal(norm.bias, hf.model.norm.bias.bfloat16().float())


def test_modules_without_a_bias_are_joined_with_those_that_have_one(tmp_path: Path) -> None:
    hf = random_model(MODELS["cohere"])
    layer = load_model(save_plain(tmp_path, hf)).layers[0]
    attention = hf.model.layers[0].self_attn
    biases = [getattr(attention, f"{name}_proj").bias for name in "qkv"]
    assert torch.equal(layer.qkv_mlp.bias, torch.cat([*biases, torch.zeros(2 * 48)]))


def test_a_missing_norm_of_a_head_is_named(tmp_path: Path) -> None:
    folder = save_plain(tmp_path, random_model(MODELS["stablelm-qk-norm"]))
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.self_attn.k_layernorm.norms.1.weight"
    del tensors[name]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"missing {name}"):
        load_model(folder)


@pytest.mark.parametrize(
    ("asked", "scales"),
    [*product(("auto", "fp8", "int8", "bf16"), (None,)), ("fp8", "static"), ("fp8", "token")],
)
@pytest.mark.parametrize("scheme", [None, "int", "float"])
def test_kernels_named_ahead_of_an_8_bit_cache(
    scheme: str | None, asked: str, scales: ScaleKind | None, tmp_path: Path
) -> None:
    hf = random_model(Qwen3Config(**SHAPE, head_dim=64))
    write_quantized(tmp_path, hf, FORMATS["ct-int8-dynamic"])
    config = {**json.loads((tmp_path / "config.json").read_text()), "dtype": "bfloat16"}
    if scheme is not None:
        config["quantization_config"]["kv_cache_scheme"] = {"num_bits": 8, "type": scheme}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = load_model(tmp_path)
    stored = kv_format(model.config, model.kv_scales, asked, scales)
    how: dict[str, Any] = {"lm_head": None, "batch_invariant": True}
    ahead = _model_kernels(tmp_path, **how, kv_cache_dtype=asked, kv_scales=scales)
    assert ahead == set(model.kernels(stored))
    if asked == "auto":
        assert ahead == set(model.kernels())
    by_scheme = {None: "bf16", "int": "int8", "float": "e4m3"}
    expected = {"auto": by_scheme[scheme], "fp8": "e4m3"}.get(asked, asked)
    assert {kernel.cache_dtype for kernel in ahead if isinstance(kernel, AppendKV)} == {expected}
    dequantized = {kernel.kv_dtype for kernel in ahead if isinstance(kernel, DequantizeKV)}
    assert dequantized == {expected} - {"bf16"}
    lie = {kernel.keys for kernel in ahead if isinstance(kernel, AttentionPrefill)}
    assert lie == ({"packed"} if dequantized else {"pages", "slots"})


def layer_of(name: str) -> Any:
    config = read_config(MODELS[name].to_dict())
    return family_of(config).layout(config).layers[0]


def test_ranks_divide_sinks_as_they_divide_heads() -> None:
    kept = [shard(layer_of("granite_swa"), rank, 2).sinks.kept_rows for rank in range(2)]
    assert kept == [slice(0, 2), slice(2, 4)]


@pytest.mark.parametrize("name", ["cohere-qk-norm", "stablelm-qk-norm"])
def test_ranks_divide_norms_of_heads_as_they_divide_heads(name: str) -> None:
    layers = [shard(layer_of(name), rank, 2) for rank in range(2)]
    assert [layer.q_norm.kept_rows for layer in layers] == [slice(0, 2), slice(2, 4)]
    assert [layer.k_norm.kept_rows for layer in layers] == [slice(0, 1), slice(1, 2)]
    assert [shard(layer_of(name), rank, 4).k_norm.kept_rows for rank in range(4)] == (
        [slice(0, 1)] * 2 + [slice(1, 2)] * 2
    )


@pytest.mark.parametrize("name", ["cohere-qk-norm", "stablelm-qk-norm"])
def test_a_rank_loads_its_norms_of_heads(name: str, tmp_path: Path) -> None:
    folder = save_plain(tmp_path, random_model(MODELS[name]))
    whole = load_model(folder).layers[0].q_norm.weight
    scheme_of = load_quantization(folder).scheme_of
    with CheckpointReader(folder) as reader:
        loader = CheckpointLoader(
            reader, scheme_of, Target(torch.device("cpu"), torch.float32, True), None
        )
        ranks = [shard(layer_of(name), rank, 2).q_norm.build(loader) for rank in range(2)]
    assert torch.equal(torch.cat([norm.weight for norm in ranks]), whole)


def test_ranks_divide_what_a_norm_over_all_heads_returns() -> None:
    layers = [shard(layer_of("olmo2"), rank, 4) for rank in range(4)]
    assert [layer.all_q_norm.kept for layer in layers] == [
        slice(first, first + 8) for first in (0, 8, 16, 24)
    ]
    assert [layer.all_k_norm.kept for layer in layers] == [slice(0, 8)] * 2 + [slice(8, 16)] * 2
    with pytest.raises(UnsupportedModelError, match=r"q_proj: got 4 groups of 8 rows for 3 ranks"):
        shard(layer_of("olmo2"), 0, 3)
