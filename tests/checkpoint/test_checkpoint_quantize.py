"""The quantiser: what it writes, who can read it, and that it never leaves half of it behind."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import MODELS, TOKENS, config_of, random_model, save, save_plain, tensors_of
from hypothesis import given
from hypothesis import strategies as st
from quantized_files import FORMATS, write_quantized
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from ostinato.checkpoint import (
    CheckpointError,
    UnsupportedCheckpointError,
    load_model,
    quantize,
    quantize_checkpoint,
)
from ostinato.checkpoint.weights import quantize_weight
from ostinato.models import AsymmetricLinear, DenseLinear, JoinedLinear, W8A8Linear, sequence_logits
from ostinato.models.families.llama import Llama

SCHEMES = {
    "int8": (torch.int8, 127.0),
    "int8-asymmetric": (torch.int8, 127.0),
    "fp8": (torch.float8_e4m3fn, 448.0),
}
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
MODULES = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}


@pytest.fixture
def src(tmp_path: Path) -> Path:
    return save_plain(tmp_path / "src", random_model(MODELS["llama"]))


def all_files(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def dequantized(model: Llama, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return the linear weights of a quantised model by module name, multiplied in `dtype`."""
    config = model.config
    rows = {
        "qkv": [config.q_size, config.kv_size, config.kv_size],
        "o": [config.hidden_size],
        "gate_up": [config.intermediate_size] * 2,
        "down": [config.hidden_size],
    }
    weights = {}
    for index, layer in enumerate(model.layers):
        for field, names in MODULES.items():
            linear = getattr(layer, field)
            whole = linear.weight.to(dtype) * linear.weight_scale.to(dtype)[:, None]
            for name, part in zip(names, whole.split(rows[field]), strict=True):
                weights[f"model.layers.{index}.{name}"] = part
    return weights


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *(("llama-biases", dtype) for dtype in DTYPES),
        ("qwen2-tied-window", torch.bfloat16),
        ("qwen3", torch.float32),
    ],
)
def test_the_compressed_tensors_package_reads_the_same_weights(
    name: str, dtype: torch.dtype, scheme: str, tmp_path: Path
) -> None:
    hf = random_model(MODELS[name])
    dst = tmp_path / "dst"
    quantize_checkpoint(save_plain(tmp_path / "src", hf, dtype), dst, scheme=scheme)
    ours = load_model(dst)
    theirs = AutoModelForCausalLM.from_pretrained(dst, dtype="auto", local_files_only=True)
    with torch.no_grad():  # the package keeps tensors, maybe made in inference mode elsewhere
        theirs(torch.tensor([TOKENS]))  # the first call makes it decompress the weights
    for module, weight in dequantized(ours, dtype).items():
        read = theirs.get_submodule(module).weight
        assert read.dtype is dtype
        assert torch.equal(read, weight), module
    for key, tensor in tensors_of(hf, dtype).items():
        if key.removesuffix(".weight") not in dequantized(ours, dtype):
            assert torch.equal(theirs.state_dict()[key], tensor), key


@pytest.mark.parametrize("scheme", SCHEMES)
def test_quantized_logits_stay_close(scheme: str, tmp_path: Path) -> None:
    src = save_plain(tmp_path / "src", random_model(MODELS["qwen3"]))
    quantize_checkpoint(src, tmp_path / "dst", scheme=scheme)
    before = sequence_logits(load_model(src), TOKENS)
    after = sequence_logits(load_model(tmp_path / "dst"), TOKENS)
    # Rounding to e4m3, which has 3 bits of fraction, costs each layer about 4 %.
    assert 0 < (after - before).std() < (0.2 if scheme == "fp8" else 0.1) * before.std()


def test_zero_points_keep_digits_of_one_sided_inputs(tmp_path: Path) -> None:
    model = random_model(MODELS["llama"])
    for layer in model.model.layers:  # an input column that is large, and of one sign
        up, gate, down = layer.mlp.up_proj, layer.mlp.gate_proj, layer.mlp.down_proj
        up.weight.data[5] = 30 * gate.weight.data[5]
        down.weight.data[:, 5] /= 30
    src = save_plain(tmp_path / "src", model)
    before, errors = sequence_logits(load_model(src), TOKENS), {}
    for scheme in ("int8", "int8-asymmetric"):
        quantize_checkpoint(src, tmp_path / scheme, scheme=scheme)
        loaded = load_model(tmp_path / scheme)
        layers = [getattr(layer, field) for layer in loaded.layers for field in MODULES]
        assert {isinstance(layer, AsymmetricLinear) for layer in layers} == {scheme != "int8"}
        errors[scheme] = (sequence_logits(loaded, TOKENS) - before).square().mean()
    assert errors["int8-asymmetric"] < 0.6 * errors["int8"]


@pytest.mark.parametrize("scheme", ["int8", "fp8"])
@pytest.mark.parametrize("scale_dtype", DTYPES)
@given(data=st.data())
def test_weights_are_rounded_to_the_nearest_code(
    scheme: str, scale_dtype: torch.dtype, data: st.DataObject
) -> None:
    dtype, grid_max = SCHEMES[scheme]
    rows, columns = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 9))
    exponent = data.draw(st.integers(-6, 6))
    seed = data.draw(st.integers(0, 2**31))
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator) * 10.0**exponent
    weight[data.draw(st.integers(0, rows - 1))] = 0
    values, scale = quantize_weight(weight, dtype, scale_dtype)
    assert values.shape == weight.shape
    assert values.dtype is dtype
    assert scale.shape == (rows, 1)
    assert scale.dtype is scale_dtype
    assert (scale.isfinite() & (scale > 0)).all()
    step = scale.float()
    error = (values.float() * step - weight).abs()
    if dtype is torch.int8:
        assert values.abs().max() <= 127
        # 127 steps may fall short of the largest weight by what rounding the scale took off.
        assert (error <= step * (0.5 + 1e-4)).all()
    else:
        # e4m3: half a unit of 3 bits of fraction, or of the smallest subnormal, 2^-9.
        assert (error <= weight.abs() * 2.0**-4 * 1.01 + step * 2.0**-10).all()
    normal = weight.abs().amax(1, keepdim=True) / grid_max
    usual = normal > torch.finfo(scale_dtype).tiny
    torch.testing.assert_close(step[usual], normal[usual], rtol=2.0**-8, atol=0.0)


@pytest.mark.parametrize("amax", [3e-3, 3e-4, 1e-4, 1e-5])
def test_small_rows_keep_their_digits_with_fp16_scales(amax: float) -> None:
    weight = torch.randn(4, 512)
    weight *= amax / weight.abs().amax(1, keepdim=True)
    values, scale = quantize_weight(weight, torch.int8, torch.float16)
    error = (values.float() * scale.float() - weight).norm() / weight.norm()
    assert error < 0.025  # .008 with exact scales; a subnormal one is up to twice as large
    assert (values.abs().amax(1) >= 63).all()


def test_a_row_of_zeros_has_scale_one() -> None:
    values, scale = quantize_weight(torch.zeros(2, 3), torch.int8, torch.float16)
    assert not values.any()
    assert scale.tolist() == [[1.0], [1.0]]


def test_blocks_of_rows_join_into_one_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(10, 4)
    whole = quantize_weight(weight, torch.int8, torch.float32)
    monkeypatch.setattr("ostinato.checkpoint.weights._BLOCK_ELEMENTS", 12)
    for left, right in zip(quantize_weight(weight, torch.int8, torch.float32), whole, strict=True):
        assert torch.equal(left, right)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_no_numbers_are_named(bad: float, tmp_path: Path) -> None:
    hf = random_model(MODELS["llama"])
    tensors = tensors_of(hf)
    tensors["model.layers.1.mlp.down_proj.weight"][3, 4] = bad
    save(tmp_path / "src", config_of(hf), tensors)
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.down_proj\.weight: holds NaN"):
        quantize_checkpoint(tmp_path / "src", tmp_path / "dst", scheme="int8")
    assert [path.name for path in tmp_path.iterdir()] == ["src"]


def test_a_weight_too_large_for_its_scale_is_named() -> None:
    with pytest.raises(ValueError, match=r"beyond the range of torch\.float16"):
        quantize_weight(torch.full((1, 1), 1e7), torch.int8, torch.float16)


def test_shards_hold_no_more_than_asked(src: Path, tmp_path: Path) -> None:
    limit = 6000
    quantize_checkpoint(src, tmp_path / "one", scheme="int8")
    quantize_checkpoint(src, tmp_path / "many", scheme="int8", max_shard_bytes=limit)
    whole = load_file(tmp_path / "one" / "model.safetensors")
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(whole)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in whole.values())
    shards = sorted(set(index["weight_map"].values()))
    assert len(shards) > 3
    assert shards[0] == f"model-00001-of-{len(shards):05}.safetensors"
    for shard in shards:
        tensors = load_file(tmp_path / "many" / shard)
        size = sum(tensor.nbytes for tensor in tensors.values())
        assert len(tensors) == 1 or size <= limit
        for name, tensor in tensors.items():
            assert index["weight_map"][name] == shard
            assert torch.equal(tensor, whole[name])
    one, many = load_model(tmp_path / "one"), load_model(tmp_path / "many")
    for left, right in zip(one.tensors(), many.tensors(), strict=True):
        assert torch.equal(left, right)


def test_the_result_is_the_same_every_time(src: Path, tmp_path: Path) -> None:
    for name in ("first", "second"):
        quantize_checkpoint(src, tmp_path / name, scheme="fp8")
    assert all_files(tmp_path / "first") == all_files(tmp_path / "second")


def test_the_rest_of_the_folder_goes_along(src: Path, tmp_path: Path) -> None:
    copied = ["tokenizer.json", "tokenizer_config.json", "generation_config.json", "LICENSE.txt"]
    left = ["pytorch_model.bin", "training_args.bin", "original"]
    for name in (*copied, *left[:2]):
        (src / name).write_text(f'{{"file": "{name}"}}')
    (src / left[2]).mkdir()
    quantize_checkpoint(src, tmp_path / "dst", scheme="int8")
    written = all_files(tmp_path / "dst")
    assert set(written) == {"config.json", "model.safetensors", *copied}
    for name in copied:
        assert written[name] == (src / name).read_bytes()
    before, after = (json.loads((f / "config.json").read_text()) for f in (src, tmp_path / "dst"))
    assert after.pop("quantization_config")["quant_method"] == "compressed-tensors"
    assert after == before


def test_a_stored_copy_of_a_tied_embedding_is_dropped(tmp_path: Path) -> None:
    hf = random_model(MODELS["llama-tied"])
    tensors = tensors_of(hf)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    quantize_checkpoint(
        save(tmp_path / "src", config_of(hf), tensors), tmp_path / "dst", scheme="int8"
    )
    assert "lm_head.weight" not in load_file(tmp_path / "dst" / "model.safetensors")
    load_model(tmp_path / "dst")


def test_ignored_modules_stay_as_they_are(src: Path, tmp_path: Path) -> None:
    ignore = ["lm_head", "re:.*layers.0.mlp.(gate|up)_proj", "model.layers.1.mlp.down_proj"]
    quantize_checkpoint(src, tmp_path / "dst", scheme="int8", ignore=ignore)
    model, plain = load_model(tmp_path / "dst"), load_model(src)
    assert isinstance(model.lm_head, DenseLinear)
    first, second = model.layers
    assert isinstance(first.gate_up, DenseLinear)
    assert torch.equal(first.gate_up.weight, plain.layers[0].gate_up.weight)
    assert isinstance(first.down, W8A8Linear)
    assert isinstance(second.gate_up, W8A8Linear)
    assert isinstance(second.down, DenseLinear)


def test_modules_that_are_joined_may_be_separated(src: Path, tmp_path: Path) -> None:
    ignore = ["lm_head", "re:.*k_proj", "re:.*layers.1.*gate_proj"]
    quantize_checkpoint(src, tmp_path / "dst", scheme="int8", ignore=ignore)
    first, second = load_model(tmp_path / "dst").layers
    assert isinstance(first.qkv, JoinedLinear)
    kinds = [type(part) for part in first.qkv.parts]
    assert kinds == [W8A8Linear, DenseLinear, W8A8Linear]
    assert isinstance(first.gate_up, W8A8Linear)
    assert isinstance(second.gate_up, JoinedLinear)


def test_the_output_projection_can_be_quantized(src: Path, tmp_path: Path) -> None:
    quantize_checkpoint(src, tmp_path / "dst", scheme="fp8", ignore=())
    assert isinstance(load_model(tmp_path / "dst").lm_head, W8A8Linear)


@pytest.mark.parametrize(
    ("ignore", "words"),
    [
        ("lm_head", "ignore: got the string 'lm_head', expected a sequence"),
        (["lm_haed"], "ignore: got 'lm_haed', which matches no linear module"),
        (["re:.*norm"], r"ignore: got 're:\.\*norm', which matches no linear module"),
        (["re:("], "ignore: '.' is no regular expression"),
    ],
)
def test_a_senseless_ignore_is_refused(
    ignore: Sequence[str], words: str, src: Path, tmp_path: Path
) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        quantize_checkpoint(src, tmp_path / "dst", scheme="int8", ignore=ignore)
    assert [path.name for path in tmp_path.iterdir()] == ["src"]


def test_a_tied_output_projection_must_be_ignored(tmp_path: Path) -> None:
    src = save_plain(tmp_path / "src", random_model(MODELS["llama-tied"]))
    with pytest.raises(UnsupportedCheckpointError, match="expected lm_head to be ignored"):
        quantize_checkpoint(src, tmp_path / "dst", scheme="int8", ignore=())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"scheme": "int4"}, "scheme: got 'int4', expected 'int8' or 'int8-asymmetric' or 'fp8'"),
        ({"scheme": "int8", "max_shard_bytes": 0}, "max_shard_bytes: got 0, expected at least 1"),
    ],
)
def test_other_arguments_are_refused(
    options: dict[str, Any], words: str, src: Path, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=words):
        quantize_checkpoint(src, tmp_path / "dst", **options)


def test_an_existing_destination_is_left_alone(src: Path, tmp_path: Path) -> None:
    before = all_files(src)
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("precious")
    for dst in (src, tmp_path / "empty", tmp_path / "file"):
        with pytest.raises(ValueError, match="which exists; expected a new folder"):
            quantize_checkpoint(src, dst, scheme="int8")
    assert all_files(src) == before
    assert (tmp_path / "file").read_text() == "precious"
    with pytest.raises(ValueError, match="expected a new folder in an existing one"):
        quantize_checkpoint(src, tmp_path / "no" / "parent", scheme="int8")


@pytest.mark.parametrize("name", ["ct-int8-dynamic", "hf-fp8-static", "modelopt-fp8"])
def test_a_quantized_source_is_refused(name: str, tmp_path: Path) -> None:
    write_quantized(tmp_path / "src", random_model(MODELS["llama"]), FORMATS[name])
    with pytest.raises(UnsupportedCheckpointError, match=r"config\.json: .*is quantised already"):
        quantize_checkpoint(tmp_path / "src", tmp_path / "dst", scheme="int8")


def test_an_incomplete_source_is_refused_before_writing(
    src: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = src / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    monkeypatch.setattr(Path, "mkdir", lambda *_args, **_options: pytest.fail("wrote"))
    with pytest.raises(CheckpointError, match=r"model\.safetensors: truncated"):
        quantize_checkpoint(src, tmp_path / "dst", scheme="int8")


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_nothing_is_left_of_an_interrupted_run(
    error: type[BaseException], src: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    seen: list[list[str]] = []

    def interrupted(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        calls.append(args)
        if len(calls) == 4:
            seen.append(sorted(path.name for path in tmp_path.iterdir()))
            raise error
        return quantize_weight(*args)

    monkeypatch.setattr(quantize, "quantize_weight", interrupted)
    with pytest.raises(error):
        quantize_checkpoint(src, tmp_path / "dst", scheme="int8")
    assert len(seen[0]) == 2, "the temporary folder was there"
    assert "dst" not in seen[0]
    assert [path.name for path in tmp_path.iterdir()] == ["src"]


@pytest.mark.parametrize(
    ("terminal", "progress", "shown"),
    [(True, True, True), (True, False, False), (False, True, False)],
)
def test_progress_is_shown_on_a_terminal_only(
    terminal: bool,
    progress: bool,
    shown: bool,
    src: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    quantize_checkpoint(src, tmp_path / "dst", scheme="int8", progress=progress)
    assert ("Quantising" in capsys.readouterr().err) == shown
