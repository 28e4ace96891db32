"""Damaged, incomplete and contradictory checkpoints: the error names the file and the tensor."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hf_models import MODELS, config_of, random_model, save, save_plain, tensors_of
from quantized_files import FORMATS, write_quantized
from safetensors.torch import load_file, save_file

from ostinato.checkpoint import CheckpointError, load_config, load_model, quantize_checkpoint
from ostinato.models import UnsupportedModelError

Q_PROJ = "model.layers.0.self_attn.q_proj"
Edit = Callable[[dict[str, torch.Tensor]], object]


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    return save_plain(tmp_path / "plain", random_model(MODELS["llama"]))


def edit(folder: Path, change: Edit) -> Path:
    file = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    change(tensors)
    save_file(tensors, file)
    return file


def refused(folder: Path, *words: object) -> None:
    pattern = ".*".join(re.escape(str(word)) for word in words)
    with pytest.raises(CheckpointError, match=pattern):
        load_model(folder)


def set_header(file: Path, header: bytes) -> None:
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    file.write_bytes(len(header).to_bytes(8, "little") + header + raw[8 + length :])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("model.norm.weight"), ["missing model.norm.weight"]),
        (lambda t: [t.pop(n) for n in list(t) if "layers.1" in n], ["missing", "and 4 more"]),
        (lambda t: t.update(surprise=torch.ones(1)), ["surprise not part of the model"]),
        (
            lambda t: t.update({f"{Q_PROJ}.weight": torch.ones(32, 31)}),
            [f"{Q_PROJ}.weight: got shape [32, 31], expected [32, 32]"],
        ),
        (
            lambda t: t.update({f"{Q_PROJ}.weight": torch.ones(32, 32).to(torch.int8)}),
            [f"{Q_PROJ}.weight: got dtype I8, expected BF16 or F16 or F32"],
        ),
        (
            lambda t: t.update({f"{Q_PROJ}.weight": torch.ones(32, 32).to(torch.float8_e5m2)}),
            [f"{Q_PROJ}.weight: got dtype F8_E5M2"],
        ),
        (
            lambda t: t.update({f"{Q_PROJ}.bias": torch.ones(32)}),
            [f"{Q_PROJ}.bias not part of the model"],
        ),
    ],
)
def test_tensors_that_do_not_fit_are_named(plain: Path, change: Edit, words: list[str]) -> None:
    refused(plain, edit(plain, change), *words)


def test_a_truncated_file_names_the_first_tensor_cut_off(plain: Path) -> None:
    file = plain / "model.safetensors"
    raw = file.read_bytes()
    file.write_bytes(raw[: len(raw) // 2])
    refused(plain, file, "truncated: ", ".weight ends at byte")
    file.write_bytes(raw[:-1])
    refused(plain, file, "truncated: ", ".weight ends at byte")


@pytest.mark.parametrize("size", [0, 5, 8, 100])
def test_a_file_cut_in_its_header_is_named(plain: Path, size: int) -> None:
    file = plain / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    refused(plain, file, "truncated, or not a safetensors file")


@pytest.mark.parametrize(
    ("header", "words"),
    [
        (b"{not json", ["corrupt safetensors header"]),
        (b"\xff\xfe\x00", ["corrupt safetensors header"]),
        (b"[1, 2]", ["corrupt safetensors header: it is no JSON object"]),
        (b'{"a": 3}', ["corrupt safetensors header: a: got 3"]),
        (b'{"a": {"dtype": "F32", "shape": [1]}}', ["corrupt safetensors header: a: got"]),
        (
            b'{"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}',
            ["a: F32 [3] cannot occupy bytes 0 to 8"],
        ),
        (
            b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, -4]}}',
            ["a: F32 [-1] cannot occupy"],
        ),
        *(
            (
                b'{"a": {"dtype": "F32", "shape": [%s], "data_offsets": [0, %s]}}' % (size, end),
                ["corrupt safetensors header: a: got", "expected dtype, shape and data_offsets"],
            )
            for size, end in [(b"1e999", b"4"), (b"1.5", b"4"), (b'"1"', b"4"), (b"1", b"1e999")]
        ),
        (b"[" * 200_000, ["corrupt safetensors header: maximum recursion depth"]),
        (b"1" * 5000, ["corrupt safetensors header: Exceeds the limit"]),
        (b'{"a": {"dtype": "NEW", "shape": [1], "data_offsets": [0, 1]}}', ["holds 1 tensors"]),
    ],
)
def test_a_corrupt_header_is_named(plain: Path, header: bytes, words: list[str]) -> None:
    file = plain / "model.safetensors"
    set_header(file, header)
    refused(plain, file, *words)


def test_a_header_the_safetensors_library_refuses_is_named(plain: Path) -> None:
    # A hole between tensors: every entry is sound by itself.
    file = plain / "model.safetensors"
    raw = file.read_bytes()
    file.write_bytes(raw + b"\0")
    refused(plain, file, "model.embed_tokens.weight")


def test_a_folder_without_weights_is_named(plain: Path) -> None:
    (plain / "model.safetensors").unlink()
    (plain / "pytest_model.bin").write_bytes(b"")
    refused(plain, plain, "holds neither model.safetensors nor model.safetensors.index.json")


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    hf = random_model(MODELS["llama"])
    tensors = list(tensors_of(hf).items())
    return save(tmp_path / "sharded", config_of(hf), dict(tensors[:9]), dict(tensors[9:]))


def test_a_missing_shard_is_named(sharded: Path) -> None:
    shard = sharded / "model-00002-of-00002.safetensors"
    shard.unlink()
    refused(sharded, shard, "cannot be read")


def test_an_index_and_shards_that_disagree_are_named(sharded: Path) -> None:
    index = sharded / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    weight_map = content["weight_map"]
    name = next(name for name, shard in weight_map.items() if "00001" in shard)
    shard = sharded / "model-00002-of-00002.safetensors"

    index.write_text(json.dumps({**content, "weight_map": {**weight_map, name: shard.name}}))
    refused(sharded, shard, f"missing {name}, which", index)

    unlisted = {key: value for key, value in weight_map.items() if key != name}
    index.write_text(json.dumps({**content, "weight_map": unlisted}))
    refused(sharded, f"{name} is not listed for this file in", index)


@pytest.mark.parametrize("shard", ["../elsewhere.safetensors", "", ".", "..", "a\0b", 1])
def test_a_shard_that_is_no_name_of_a_file_is_refused(sharded: Path, shard: object) -> None:
    index = sharded / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a.weight": shard}}))
    refused(sharded, index, "a.weight", repr(shard), "expected the name of a file beside it")

    index.write_text("{}")
    refused(sharded, index, "weight_map: got None, expected an object")

    index.write_text("{")
    refused(sharded, index, "not valid JSON")


@pytest.mark.parametrize("bad", [float("nan"), float("-inf")])
@pytest.mark.parametrize("dtype", [None, torch.float16])
@pytest.mark.parametrize("name", ["model.norm.weight", f"{Q_PROJ}.weight"])
def test_dense_weights_that_are_no_numbers_are_named(
    name: str, dtype: torch.dtype | None, bad: float, plain: Path
) -> None:
    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name].view(-1)[5] = bad

    file = edit(plain, spoil)
    words = re.escape(f"{file}: {name}: holds NaN or an infinity")
    with pytest.raises(CheckpointError, match=words):
        load_model(plain, dtype=dtype)
    with pytest.raises(CheckpointError, match=re.escape(f"{file}: {name}: holds NaN")):
        quantize_checkpoint(plain, plain.parent / "quantized", scheme="int8", progress=False)


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_e4m3_weights_that_are_no_numbers_are_named(code: int, tmp_path: Path) -> None:
    write_quantized(tmp_path, random_model(MODELS["llama"]), FORMATS["ct-fp8-dynamic"])
    name = f"{Q_PROJ}.weight"

    def set_code(value: int) -> Edit:
        return lambda tensors: tensors[name].view(torch.uint8)[3].fill_(value)

    edit(tmp_path, set_code(code - 1))  # the largest number of this sign
    load_model(tmp_path)
    file = edit(tmp_path, set_code(code))
    refused(tmp_path, f"{file}: {name}: holds NaN or an infinity")


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -0.5])
@pytest.mark.parametrize("suffix", ["weight_scale", "input_scale"])
def test_scales_that_are_no_scales_are_named(bad: float, suffix: str, tmp_path: Path) -> None:
    write_quantized(tmp_path, random_model(MODELS["llama"]), FORMATS["ct-int8-static"])
    name = f"{Q_PROJ}.{suffix}"

    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name].view(-1)[-1] = bad

    file = edit(tmp_path, spoil)
    refused(tmp_path, f"{file}: {name}: got {bad} at index", "expected a finite number")


def test_a_weight_scale_may_be_zero_and_an_input_scale_may_not(tmp_path: Path) -> None:
    write_quantized(tmp_path, random_model(MODELS["llama"]), FORMATS["ct-int8-static"])
    edit(tmp_path, lambda tensors: tensors[f"{Q_PROJ}.weight_scale"].zero_())
    load_model(tmp_path)
    edit(tmp_path, lambda tensors: tensors[f"{Q_PROJ}.input_scale"].zero_())
    refused(tmp_path, f"{Q_PROJ}.input_scale: got 0.0", "above 0")


def test_a_zero_point_beyond_int8_is_named(tmp_path: Path) -> None:
    write_quantized(tmp_path, random_model(MODELS["llama"]), FORMATS["ct-int8-asymmetric"])
    name = f"{Q_PROJ}.input_zero_point"
    edit(tmp_path, lambda tensors: tensors.update({name: torch.tensor([300], dtype=torch.int32)}))
    refused(tmp_path, f"{name}: got 300, expected -128 to 127")


@pytest.mark.parametrize("name", ["ct-int8-asymmetric", "ct-fp8-static", "hf-fp8-transformers"])
def test_missing_quantization_parameters_are_named(name: str, tmp_path: Path) -> None:
    form = FORMATS[name]
    file = write_quantized(tmp_path, random_model(MODELS["llama"]), form)
    module = next(module for module in file.modules if module.endswith("q_proj"))
    edit(tmp_path, lambda tensors: tensors.pop(f"{module}.{form.suffixes[1]}"))
    refused(tmp_path, "missing", f"{module}.input_scale")


def test_a_dense_weight_called_quantized_is_named(tmp_path: Path) -> None:
    write_quantized(tmp_path, random_model(MODELS["llama"]), FORMATS["ct-fp8-dynamic"])
    edit(tmp_path, lambda tensors: tensors.update({f"{Q_PROJ}.weight": torch.ones(32, 32)}))
    refused(tmp_path, f"{Q_PROJ}.weight: got dtype F32, expected F8_E4M3")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "config.json: not valid JSON"),
        ("[]", r"config.json: got \[\], expected an object"),
        ("[" * 200_000, "config.json: not valid JSON: maximum recursion depth"),
        ("1" * 5000, "config.json: not valid JSON: Exceeds the limit"),
        ('{"model_type": "llama", "vocab_size": "x"}', "config.json: vocab_size: got 'x'"),
        (b"\xff\xff", "config.json: cannot be read"),
    ],
)
def test_a_bad_config_is_named(plain: Path, text: str | bytes, words: str) -> None:
    (plain / "config.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    for load in (load_config, load_model):
        with pytest.raises((CheckpointError, UnsupportedModelError), match=f"{plain}/{words}"):
            load(plain)


def test_a_folder_without_a_config_is_named(plain: Path) -> None:
    (plain / "config.json").unlink()
    for load in (load_config, load_model):
        with pytest.raises(CheckpointError, match=f"got '{plain}', a folder without config.json"):
            load(plain)


@pytest.mark.parametrize("ids", ['"</s>"', "61", "[2, -1]", "true"])
def test_end_tokens_that_are_no_tokens_are_named(ids: str, plain: Path) -> None:
    file = plain / "generation_config.json"
    file.write_text(f'{{"eos_token_id": {ids}}}')
    refused(plain, f"{file}: eos_token_id: got ", ", expected integers from 0 to 60")


def test_another_architecture_is_refused(plain: Path) -> None:
    (plain / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(UnsupportedModelError, match="model_type: got 'gpt2'"):
        load_model(plain)
