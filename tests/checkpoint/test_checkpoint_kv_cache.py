"""Checkpoints made for an 8-bit KV cache: their scales, and what an engine makes of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import MODELS, TOKENS, random_model
from quantized_files import FORMATS, write_quantized
from safetensors.torch import load_file, save_file

from ostinato.checkpoint import CheckpointError, UnsupportedCheckpointError, load_model
from ostinato.engine import Engine
from ostinato.models import kv_format, sequence_logits

INT8, E4M3 = torch.int8, torch.float8_e4m3fn
FP8_SCHEME = {"num_bits": 8, "type": "float", "dynamic": False}
CT_SCHEME = {
    "num_bits": 8,
    "type": "int",
    "dynamic": False,
    "strategy": "tensor",
    "symmetric": True,
    "group_size": None,
    "block_structure": None,
    "actorder": None,
    "observer": "minmax",
}
BESIDE = "model.layers.{}.self_attn.{}_scale"
INSIDE = "model.layers.{0}.self_attn.{1}_proj.{1}_scale"
OUTPUT = "model.layers.{0}.self_attn.{1}_proj.output_scale"
SHARED = "model.layers.{0}.self_attn.kv_scale"


def checkpoint(folder: Path, form: str, names: str | None = BESIDE, **fields: Any) -> Path:
    """Write a checkpoint with these fields; its layers' scales are 1, 2 (k) and 3, 4 (v)."""
    write_quantized(folder, random_model(MODELS["llama"]), FORMATS[form])
    file = folder / FORMATS[form].file
    config = json.loads(file.read_text())
    inner = config.get("quantization") or config["quantization_config"]
    inner.update(fields)
    file.write_text(json.dumps(config))
    if names is not None:
        shape = (1,) if form.startswith("ct") else ()
        scales = {
            names.format(layer, part): torch.full(shape, number + layer)
            for part, number in (("v", 3.0), ("k", 1.0))
            for layer in range(2)
        }
        add(folder, scales)
    return folder


def add(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    file = folder / "model.safetensors"
    save_file({**load_file(file), **tensors}, file)


@pytest.mark.parametrize(
    ("form", "names", "fields", "dtype"),
    [
        ("ct-int8-dynamic", BESIDE, {"kv_cache_scheme": CT_SCHEME}, INT8),
        ("ct-fp8-static", BESIDE, {"kv_cache_scheme": {**CT_SCHEME, "type": "float"}}, E4M3),
        ("ct-fp8-static", OUTPUT, {"kv_cache_scheme": FP8_SCHEME}, E4M3),
        ("hf-fp8-static", INSIDE, {"kv_cache_scheme": "static"}, E4M3),
        ("modelopt-fp8", INSIDE, {"kv_cache_quant_algo": "FP8"}, E4M3),
        ("modelopt-fp8", INSIDE, {"kv_cache_quant_algo": "INT8"}, INT8),
        ("modelopt-fp8-config", INSIDE, {"kv_cache_scheme": FP8_SCHEME}, E4M3),
        (
            *("modelopt-fp8-config", INSIDE),
            {"kv_cache_scheme": FP8_SCHEME, "kv_cache_quant_algo": "FP8"},
            E4M3,
        ),
    ],
)
def test_scales_are_kept_and_serve_8_bits(
    form: str, names: str, fields: dict[str, Any], dtype: torch.dtype, tmp_path: Path
) -> None:
    model = load_model(checkpoint(tmp_path / "kv", form, names, **fields))
    found = model.kv_scales
    assert found is not None
    assert found.dtype is dtype
    assert found.k is not None
    assert found.v is not None
    assert found.k.tolist() == [1.0, 2.0]
    assert found.v.tolist() == [3.0, 4.0]
    plain = load_model(checkpoint(tmp_path / "plain", form, None))
    assert plain.kv_scales is None
    expected = sequence_logits(plain, TOKENS)
    for name in ("auto", "fp32"):
        served = kv_format(model.config, found, name)
        assert (served.dtype is dtype) == (name == "auto")
        logits = sequence_logits(model, TOKENS, cache_format=served)
        assert torch.equal(logits, expected) == (name == "fp32")
    assert torch.equal(
        sequence_logits(model, TOKENS),
        sequence_logits(plain, TOKENS, cache_format=kv_format(plain.config, found)),
    )


def test_a_wrapped_configuration_names_the_cache(tmp_path: Path) -> None:
    checkpoint(tmp_path, "ct-int8-dynamic", kv_cache_scheme=CT_SCHEME)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    inner = config["quantization_config"]
    wrapped = {"quant_method": "compressed-tensors", "quantization_config": inner}
    file.write_text(json.dumps({**config, "quantization_config": wrapped}))
    found = load_model(tmp_path).kv_scales
    assert found is not None
    assert found.dtype is INT8
    wrapped["kv_cache_scheme"] = inner.pop("kv_cache_scheme")
    file.write_text(json.dumps({**config, "quantization_config": wrapped}))
    with pytest.raises(UnsupportedCheckpointError, match="kv_cache_scheme"):
        load_model(tmp_path)


@pytest.mark.parametrize("shape", [(2, 1, 1), (2,)])
def test_scales_of_heads_are_kept(shape: tuple[int, ...], tmp_path: Path) -> None:
    scheme = {**CT_SCHEME, "strategy": "attn_head"}
    folder = checkpoint(tmp_path, "ct-int8-dynamic", None, kv_cache_scheme=scheme)
    names = [BESIDE.format(layer, part) for part in "kv" for layer in range(2)]
    numbers = [torch.tensor([at + 1.0, at + 2.0]) for at in range(4)]
    add(folder, {name: x.reshape(shape) for name, x in zip(names, numbers, strict=True)})
    model = load_model(folder)
    found = model.kv_scales
    assert found is not None
    assert found.k is not None
    assert found.v is not None
    assert found.k.tolist() == [[1, 2], [2, 3]]
    assert found.v.tolist() == [[3, 4], [4, 5]]
    assert str(kv_format(model.config, found)) == (
        "int8, static scales of the checkpoint per layer and head"
    )


def test_a_scale_of_one_head_is_not_one_of_all(tmp_path: Path) -> None:
    folder = checkpoint(
        tmp_path, "ct-int8-dynamic", kv_cache_scheme={**CT_SCHEME, "strategy": "attn_head"}
    )
    with pytest.raises(CheckpointError, match=r"k_scale: got shape \[1\], expected \[2, 1, 1\]"):
        load_model(folder)


def test_a_shared_scale_is_that_of_both(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, "hf-fp8-static", None, kv_cache_scheme="static")
    add(folder, {SHARED.format(layer): torch.tensor(2.0 + layer) for layer in range(2)})
    found = load_model(folder).kv_scales
    assert found is not None
    assert found.k is not None
    assert found.v is not None
    assert found.k.tolist() == found.v.tolist() == [2.0, 3.0]


def test_a_wrapped_configuration_is_read(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, "ct-int8-dynamic", kv_cache_scheme=CT_SCHEME)
    config = json.loads((folder / "config.json").read_text())
    inner = config["quantization_config"]
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "quantization_config": inner,
    }
    (folder / "config.json").write_text(json.dumps(config))
    found = load_model(folder).kv_scales
    assert found is not None
    assert found.dtype is INT8


@pytest.mark.parametrize(
    ("kind", "names", "options", "words"),
    [
        ("int", BESIDE, {}, "int8, static scales of the checkpoint per layer"),
        ("float", BESIDE, {}, "fp8, static scales of the checkpoint per layer"),
        ("float", BESIDE, {"kv_cache_dtype": "fp8"}, "fp8, static scales of the checkpoint per l"),
        ("float", BESIDE, {"kv_scales": "token"}, "fp8, a scale per token and head"),
        ("float", BESIDE, {"kv_cache_dtype": "int8"}, "int8, a scale per token and head"),
        ("float", None, {}, "fp8, static scales of 1"),
        ("int", None, {}, "int8, a scale per token and head"),
        ("int", BESIDE, {"kv_cache_dtype": "fp8"}, "fp8, a scale per token and head"),
        (
            *("int", BESIDE),
            {"kv_cache_dtype": "fp8", "kv_scales": "static"},
            "fp8, static scales of 1",
        ),
        ("int", BESIDE, {"kv_cache_dtype": "fp32"}, "fp32"),
    ],
)
def test_an_engine_says_how_it_serves_them(
    kind: str, names: str | None, options: dict[str, Any], words: str, tmp_path: Path
) -> None:
    scheme = {**CT_SCHEME, "type": kind}
    folder = checkpoint(tmp_path, "ct-int8-dynamic", names, kv_cache_scheme=scheme)
    engine = Engine(load_model(folder), None, max_batch=1, max_context=16, **options)
    assert f"KV cache: {words}" in str(engine.capture(progress=False))
    assert str(engine.cache.format).startswith(words)


@pytest.mark.parametrize(("kind", "names"), [("float", BESIDE), ("int", None)])
def test_static_int8_needs_scales_of_the_checkpoint(
    kind: str, names: str | None, tmp_path: Path
) -> None:
    scheme = {**CT_SCHEME, "type": kind}
    model = load_model(checkpoint(tmp_path, "ct-int8-dynamic", names, kv_cache_scheme=scheme))
    options: dict[str, Any] = {"kv_cache_dtype": "int8", "kv_scales": "static"}
    with pytest.raises(ValueError, match="kv_scales: got 'static', but the checkpoint has no scal"):
        Engine(model, None, max_batch=1, max_context=16, **options)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"kv_cache_scheme": {**CT_SCHEME, "num_bits": 4}}, "num_bits: got 4, expected 8"),
        ({"kv_cache_scheme": {}}, "num_bits: got None, expected 8"),
        ({"kv_cache_scheme": {"num_bits": 8}}, "type: got None, expected 'int' or 'float'"),
        ({"kv_cache_scheme": {**CT_SCHEME, "strategy": "channel"}}, "strategy: got 'channel'"),
        ({"kv_cache_scheme": {**CT_SCHEME, "dynamic": True}}, "dynamic: got True"),
        ({"kv_cache_scheme": {**CT_SCHEME, "symmetric": False}}, "symmetric: got False"),
        ({"kv_cache_scheme": {**CT_SCHEME, "new_field": 1}}, "new_field: got 1, a field that is"),
        ({"kv_cache_scheme": {**CT_SCHEME, "group_size": 16}}, "group_size: got 16"),
        ({"kv_cache_scheme": "dynamic"}, "kv_cache_scheme: got 'dynamic', expected 'static'"),
        ({"kv_cache_scheme": ["static"]}, r"kv_cache_scheme: got \['static'\], expected 'static'"),
        ({"kv_cache_quant_algo": "NVFP4"}, "kv_cache_quant_algo: got 'NVFP4', expected None or"),
        ({"kv_cache_quant_algo": ["FP8"]}, r"kv_cache_quant_algo: got \['FP8'\]"),
        (
            {"kv_cache_quant_algo": "FP8", "kv_cache_scheme": CT_SCHEME},
            "kv_cache_scheme: got .*: kv_cache_quant_algo is 'FP8'",
        ),
    ],
)
@pytest.mark.parametrize("form", ["ct-int8-dynamic", "hf-fp8-static", "modelopt-fp8"])
def test_other_caches_are_refused_by_name(
    form: str, fields: dict[str, Any], words: str, tmp_path: Path
) -> None:
    folder = checkpoint(tmp_path, form, None, **fields)
    with pytest.raises(UnsupportedCheckpointError, match=words):
        load_model(folder)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_a_scale_that_is_none_is_refused(value: float, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, "ct-int8-dynamic", kv_cache_scheme=CT_SCHEME)
    add(folder, {BESIDE.format(1, "v"): torch.tensor([value])})
    with pytest.raises(CheckpointError, match=r"layers\.1\.self_attn\.v_scale: got .* above 0"):
        load_model(folder)


def test_a_scale_of_a_head_that_is_none_is_refused(tmp_path: Path) -> None:
    scheme = {**CT_SCHEME, "strategy": "attn_head"}
    folder = checkpoint(tmp_path, "ct-int8-dynamic", None, kv_cache_scheme=scheme)
    names = [BESIDE.format(layer, part) for part in "kv" for layer in range(2)]
    for value in (0.0, -1.0, float("nan"), float("inf")):
        add(folder, {name: torch.tensor([1.0, value]) for name in names})
        with pytest.raises(CheckpointError, match=r"k_scale: got .* at index 1, expected a finite"):
            load_model(folder)


def test_a_missing_and_a_misshapen_scale_are_named(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, "ct-int8-dynamic", kv_cache_scheme=CT_SCHEME)
    add(folder, {BESIDE.format(1, "k"): torch.ones(2)})
    with pytest.raises(CheckpointError, match=r"1\.self_attn\.k_scale: got shape \[2\], expected"):
        load_model(folder)
    tensors = load_file(folder / "model.safetensors")
    del tensors[BESIDE.format(1, "k")]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"missing model\.layers\.1\.self_attn\.k_scale or"):
        load_model(folder)


def test_scales_without_a_scheme_are_unknown_tensors(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, "ct-int8-dynamic")
    with pytest.raises(CheckpointError, match=r"k_scale.* not part of the model"):
        load_model(folder)
