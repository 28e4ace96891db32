"""Quantisation formats: what is understood, and what is refused by name before weights are read."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import MODELS, SHAPE, random_model, save_plain
from quantized_files import compressed_tensors

from ostinato.checkpoint import CheckpointError, UnsupportedCheckpointError, load_model
from ostinato.checkpoint.format import StoredSchemeOf
from ostinato.checkpoint.quantization import load_quantization
from ostinato.checkpoint.storage.dense import DENSE
from ostinato.checkpoint.storage.w8a8 import W8A8Scheme

MODEL = {"model_type": "llama", **SHAPE}
INT8_DYNAMIC = W8A8Scheme(torch.int8, per_channel=True, static_input=False)
INT8_ZERO_POINTS = W8A8Scheme(
    torch.int8, per_channel=True, static_input=False, symmetric_input=False
)
FP8_STATIC = W8A8Scheme(torch.float8_e4m3fn, per_channel=False, static_input=True)
FP8_DYNAMIC = W8A8Scheme(torch.float8_e4m3fn, per_channel=False, static_input=False)
# What messages say of scales that are finer than a row or a token.
BLOCKS = "block scales are not supported, only one scale per"
GROUPS = "group scales are not supported, only one scale per"
UP = "model.layers.0.mlp.up_proj"


def write(folder: Path, **config: Any) -> None:
    """Write a folder that has no weights, so that whatever is raised came before reading any."""
    (folder / "config.json").write_text(json.dumps({**MODEL, **config}))


def parse(folder: Path, **config: Any) -> StoredSchemeOf:
    write(folder, **config)
    return load_quantization(folder).scheme_of


def int8(**changes: Any) -> dict[str, Any]:
    """Return an INT8 configuration; a key such as weights__num_bits reaches into group_0."""
    config = copy.deepcopy(compressed_tensors("int", "channel", "token"))
    group: Any = config["config_groups"]["group_0"]
    for path, value in changes.items():
        if path.startswith("group__"):
            group[path.removeprefix("group__")] = value
        elif "__" in path:
            part, _, name = path.partition("__")
            group[part][name] = value
        else:
            config[path] = value
    return config


def block_fp8(**changes: Any) -> dict[str, Any]:
    """Return what llm-compressor's scheme FP8_BLOCK writes."""
    fields = {
        "format": "float-quantized",
        "weights__type": "float",
        "weights__strategy": "block",
        "weights__block_structure": [128, 128],
        "input_activations__type": "float",
        "input_activations__strategy": "group",
        "input_activations__group_size": 128,
    }
    return int8(**{**fields, **changes})


def fp8_tensors(**fields: Any) -> dict[str, Any]:
    return compressed_tensors("float", "tensor", "tensor", **fields)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"quant_method": "gptq", "bits": 8}, "quant_method: got 'gptq', expected 'compressed-te"),
        ({"quant_method": "awq", "bits": 4}, "quant_method: got 'awq'"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "got 'bitsandbytes'"),
        ({"quant_method": "fbgemm_fp8", "new_field": 1}, "new_field: got 1, a field that is not"),
        ({"quant_method": "something_new"}, "quant_method: got 'something_new'"),
        ({"bits": 8}, "quant_method: got None"),
        # compressed-tensors
        (int8(format="pack-quantized"), "format: got 'pack-quantized'"),
        (int8(format="marlin-24"), "format: got 'marlin-24'"),
        (int8(format="dense"), "format: got 'dense'"),
        (int8(format=None), "format: got None"),
        (int8(format="mixed-precision"), "group_0: format: got None"),
        (int8(format="float-quantized"), "weights: type: got 'int', expected 'float'"),
        (int8(quantization_status="calibration"), "quantization_status: got 'calibration'"),
        (int8(sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config: format: got 's"),
        (int8(transform_config={"config_groups": 1}), "transform_config: got"),
        (int8(new_field=3), "new_field: got 3, a field that is not supported"),
        (int8(weights__num_bits=4), "weights: num_bits: got 4, expected 8"),
        (int8(weights__strategy="group"), f"weights: strategy: got 'group': {GROUPS}"),
        (int8(weights__strategy="tensor_group"), f"strategy: got 'tensor_group': {GROUPS}"),
        (int8(weights__group_size=128), f"weights: group_size: got 128: {GROUPS}"),
        (int8(weights__strategy="block"), r"weights: block_structure: got None, expected \[128, "),
        (int8(weights__strategy="attn_head"), "weights: strategy: got 'attn_head', expected"),
        (
            int8(weights__block_structure=[128, 128]),
            rf"weights: block_structure: got \[128, 128\]: {BLOCKS}",
        ),
        (int8(weights__block_structure="2x4"), f"block_structure: got '2x4': {BLOCKS}"),
        (block_fp8(format="int-quantized"), "weights: type: got 'float', expected"),
        (block_fp8(weights__strategy=None), rf"block_structure: got \[128, 128\]: {BLOCKS}"),
        (int8(weights__actorder="group"), "weights: actorder: got 'group'"),
        (int8(weights__symmetric=False), "weights: symmetric: got False, expected True"),
        (int8(weights__dynamic=True), "weights: dynamic: got True, expected False"),
        (int8(weights__new_field=[1]), r"weights: new_field: got \[1\]"),
        (int8(input_activations__num_bits=4), "input_activations: num_bits: got 4"),
        (int8(input_activations__type="float"), "input_activations: type: got 'float', expected"),
        (block_fp8(input_activations__symmetric=False), "activations: symmetric: got False"),
        (int8(input_activations__strategy="tensor"), "strategy: got 'tensor', expected 'token'"),
        (
            int8(input_activations__strategy="group"),
            f"activations: strategy: got 'group': {GROUPS}",
        ),
        (int8(input_activations__group_size=128), f"activations: group_size: got 128: {GROUPS}"),
        (int8(input_activations__dynamic="local"), "dynamic: got 'local'"),
        (int8(input_activations__dynamic=False), "strategy: got 'token', expected 'tensor'"),
        (int8(group__input_activations=None), "input_activations: not quantised; only 8-bit"),
        (int8(group__weights=None), "weights: not quantised; only 8-bit"),
        (int8(group__output_activations={"num_bits": 8}), "output_activations: got"),
        (int8(group__new_field=1), "group_0: new_field: got 1"),
        (
            compressed_tensors("float", "channel", "asymmetric"),
            "input_activations: symmetric: got False, expected True",
        ),
        (
            {"quantization_config": int8(), "sparsity_config": {"format": "sparse-bitmask"}}
            | {"quant_method": "compressed-tensors"},
            "sparsity_config: format: got 'sparse-bitmask', expected 'dense'",
        ),
        # Hugging Face fp8
        (
            {
                "quant_method": "fp8",
                "activation_scheme": "dynamic",
                "weight_block_size": [1, 128],
            },
            r"weight_block_size: got \[1, 128\], expected \[128, 128\]",
        ),
        ({"quant_method": "fp8"}, "activation_scheme: got None, expected 'static' or 'dynamic'"),
        (
            {"quant_method": "fp8", "activation_scheme": "dynamic", "scale_fmt": "ue8m0"},
            "scale_fmt: got 'ue8m0'",
        ),
        (
            {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e5m2"},
            "fmt: got 'e5m2'",
        ),
        (
            {"quant_method": "fp8", "activation_scheme": "dynamic", "modules_to_convert": ["a"]},
            r"modules_to_convert: got \['a'\]",
        ),
        # ModelOpt
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "quant_algo: got 'NVFP4', expected"),
        ({"quant_method": "modelopt", "quant_algo": "FP8_PB_REAL"}, "quant_algo: got 'FP8_PB_R"),
        ({"quant_method": "modelopt"}, "quant_algo: got None, expected 'FP8'"),
        ({"quant_method": "modelopt", "quant_algo": "FP8", "group_size": 16}, "group_size: got 16"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(
    config: dict[str, Any], words: str, tmp_path: Path
) -> None:
    write(tmp_path, quantization_config=config)
    with pytest.raises(UnsupportedCheckpointError, match=rf"config\.json: quant.*{words}"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("quantization", "words"),
    [
        ({"quant_algo": "W4A8_AWQ"}, "quantization: quant_algo: got 'W4A8_AWQ'"),
        ({"quant_algo": "FP8", "kv_cache_quant_algo": "NVFP4"}, "quant.*: got 'NVFP4'"),
    ],
)
def test_hf_quant_config_is_refused_by_name(
    quantization: dict[str, Any], words: str, tmp_path: Path
) -> None:
    write(tmp_path)
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": quantization}))
    with pytest.raises(UnsupportedCheckpointError, match=rf"hf_quant_config\.json: {words}"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("fp8", "quantization_config: got 'fp8', expected an object"),
        (int8(ignore="lm_head"), "ignore: got 'lm_head', expected a list of strings"),
        (int8(ignore=[3]), r"ignore: got \[3\], expected a list of strings"),
        (int8(ignore=["re:("]), r"'\(' is no regular expression"),
        (int8(group__targets=["re:*"]), r"'\*' is no regular expression"),
        (int8(group__targets=[]), "group_0: targets: got none, expected at least one"),
        (int8(config_groups={"W8A8": ["Linear"]}), "W8A8: got .*, expected an object"),
        (int8(config_groups=None), "config_groups: got None, expected an object"),
        (
            {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["a("]},
            "is no regular expression",
        ),
        (
            {"quant_method": "fbgemm_fp8", "modules_to_not_convert": ["a("]},
            "is no regular expression",
        ),
        (
            {"quant_method": "fbgemm_fp8", "activation_scale_ub": -1.0},
            "activation_scale_ub: got -1.0, expected a finite number above 0",
        ),
    ],
)
def test_a_malformed_configuration_is_named(config: Any, words: str, tmp_path: Path) -> None:
    write(tmp_path, quantization_config=config)
    with pytest.raises(CheckpointError, match=words):
        load_model(tmp_path)


def test_a_plain_checkpoint_has_no_schemes(tmp_path: Path) -> None:
    assert parse(tmp_path)(UP) is DENSE
    assert parse(tmp_path, quantization_config=None, compression_config={})(UP) is DENSE


def test_compressed_tensors_matches_names_patterns_and_classes(tmp_path: Path) -> None:
    group = int8()["config_groups"]["group_0"]
    fp8 = fp8_tensors()["config_groups"]["group_0"]
    config = int8(
        format="mixed-precision",
        config_groups={
            "group_0": {**group, "targets": ["Linear"], "format": "int-quantized"},
            "group_1": {**fp8, "targets": ["re:.*up_proj", UP], "format": "float-quantized"},
            "group_2": {
                **group,
                "targets": ["re:.*layers.1.mlp.up_proj"],
                "format": "naive-quantized",
            },
        },
        ignore=["re:.*o_proj$", "model.layers.0.mlp.down_proj"],
    )
    scheme_of = parse(tmp_path, quantization_config=config)
    assert scheme_of("lm_head") == INT8_DYNAMIC
    assert scheme_of("model.layers.0.mlp.gate_proj") == INT8_DYNAMIC
    assert scheme_of(UP) == FP8_STATIC
    assert scheme_of("model.layers.2.mlp.up_proj") == FP8_STATIC
    # Of two patterns the first in alphabetical order decides, as in the compressed-tensors package.
    assert scheme_of("model.layers.1.mlp.up_proj") == INT8_DYNAMIC
    assert scheme_of("model.layers.0.self_attn.o_proj") is DENSE
    assert scheme_of("model.layers.0.mlp.down_proj") is DENSE
    assert scheme_of("model.layers.1.mlp.down_proj") == INT8_DYNAMIC


def test_modules_of_no_target_and_of_an_ignored_class_are_plain(tmp_path: Path) -> None:
    scheme_of = parse(tmp_path, quantization_config=int8(group__targets=["re:.*mlp.*"], ignore=[]))
    assert scheme_of(UP) == INT8_DYNAMIC
    assert scheme_of("lm_head") is DENSE
    assert parse(tmp_path, quantization_config=int8(ignore=["Linear"]))(UP) is DENSE


@pytest.mark.parametrize(
    ("config", "scheme"),
    [
        ({"compression_config": int8()}, INT8_DYNAMIC),
        (
            {"compression_config": {k: v for k, v in int8().items() if k != "quant_method"}},
            INT8_DYNAMIC,
        ),
        (
            {
                "quantization_config": {
                    "quant_method": "compressed-tensors",
                    "quantization_config": int8(),
                    "sparsity_config": {},
                    "run_compressed": True,
                }
            },
            INT8_DYNAMIC,
        ),
        ({"quantization_config": int8(weights__group_size=-1)}, INT8_DYNAMIC),
        (
            {"quantization_config": int8(weights__group_size=-1, weights__strategy=None)},
            INT8_DYNAMIC,
        ),
        ({"quantization_config": int8(sparsity_config={}, kv_cache_scheme=None)}, INT8_DYNAMIC),
        ({"quantization_config": int8(version="0.20.0", weights__actorder=False)}, INT8_DYNAMIC),
        ({"quantization_config": int8(weights__actorder="weight")}, INT8_DYNAMIC),
        ({"quantization_config": int8(weights__actorder="static")}, INT8_DYNAMIC),
        (
            {"quantization_config": int8(sparsity_config={"format": "dense", "ignore": ["a"]})},
            INT8_DYNAMIC,
        ),
        ({"quantization_config": fp8_tensors()}, FP8_STATIC),
        ({"quantization_config": int8(input_activations__symmetric=False)}, INT8_ZERO_POINTS),
    ],
)
def test_spellings_of_compressed_tensors(
    config: dict[str, Any], scheme: W8A8Scheme, tmp_path: Path
) -> None:
    assert parse(tmp_path, **config)(UP) == scheme


def test_dynamic_fp8_per_tensor_becomes_per_token(tmp_path: Path) -> None:
    config = fp8_tensors()
    config["config_groups"]["group_0"]["input_activations"]["dynamic"] = True
    assert parse(tmp_path, quantization_config=config)(UP) == FP8_DYNAMIC


@pytest.mark.parametrize(
    ("entry", "ignored", "kept"),
    [
        (UP, UP, "model.layers.0.mlp.gate_proj"),
        ("model.layers.1", "model.layers.1.mlp.up_proj", "model.layers.11.mlp.up_proj"),
        ("up_proj", UP, "model.layers.0.mlp.gate_proj"),
        ("p_proj", UP, "model.layers.0.mlp.gate_proj"),
        ("model.layers.1.", "model.layers.1.mlp.up_proj", "model.layers.2.mlp.up_proj"),
        ("model.layers.*.mlp", UP, "model.layers.0.self_attn.o_proj"),
        ("re:.*up_proj", UP, "model.layers.0.mlp.gate_proj"),
    ],
)
@pytest.mark.parametrize("key", ["ignored_layers", "modules_to_not_convert"])
def test_fp8_entries_mean_modules_their_children_and_endings(
    key: str, entry: str, ignored: str, kept: str, tmp_path: Path
) -> None:
    config = {"quant_method": "fp8", "activation_scheme": "dynamic", key: [entry]}
    scheme_of = parse(tmp_path, quantization_config=config)
    assert scheme_of(ignored) is DENSE
    assert scheme_of(kept) == FP8_DYNAMIC
    assert scheme_of("lm_head") is DENSE


@pytest.mark.parametrize(
    ("entry", "ignored", "kept"),
    [
        (UP, UP, "model.layers.0.mlp.gate_proj"),
        ("model.layers.1.*", "model.layers.1.mlp.up_proj", "model.layers.11.mlp.up_proj"),
        ("model.layers.1", "model.layers.1.mlp.up_proj", "model.layers.11.mlp.up_proj"),
        ("*up_proj", UP, "model.layers.0.mlp.gate_proj"),
        ("mlp", UP, "model.layers.0.self_attn.o_proj"),
    ],
)
def test_modelopt_entries_are_wildcards_or_parts_of_names(
    entry: str, ignored: str, kept: str, tmp_path: Path
) -> None:
    config = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": [entry]}
    scheme_of = parse(tmp_path, quantization_config=config)
    assert scheme_of(ignored) is DENSE
    assert scheme_of(kept) == FP8_STATIC
    assert scheme_of("lm_head") is DENSE


def test_a_tied_output_projection_must_not_be_quantized(tmp_path: Path) -> None:
    save_plain(tmp_path, random_model(MODELS["llama-tied"]))
    write(tmp_path, quantization_config=int8(ignore=[]), tie_word_embeddings=True)
    with pytest.raises(UnsupportedCheckpointError, match="lm_head: the checkpoint quantises it"):
        load_model(tmp_path)
