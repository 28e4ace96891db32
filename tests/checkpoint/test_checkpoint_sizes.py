"""Sizes in config.json cost nothing before the files' headers confirm them."""

from __future__ import annotations

import json
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hf_models import MODELS, random_model, save_plain

from ostinato.checkpoint import CheckpointError, load_config, load_model, quantize_checkpoint
from ostinato.cli.main import main
from ostinato.models import UnsupportedModelError, read_config

pytestmark = pytest.mark.timeout(60)

FAMILIES = ["llama", "mistral-window", "qwen2-tied-window", "qwen3"]
HUGE = 2**31 - 1


def quantize(folder: Path) -> None:
    quantize_checkpoint(folder, folder.parent / "out", scheme="int8", progress=False)


def loaded(folder: Path) -> None:
    load_model(folder, max_context=16)


@pytest.fixture(params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return save_plain(tmp_path / "m", random_model(MODELS[request.param]))


def change(folder: Path, **fields: Any) -> None:
    file = folder / "config.json"
    config = {**json.loads(file.read_text()), **fields}
    file.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


def cheaply_refused(call: Callable[[Path], object], folder: Path, words: str) -> None:
    tracemalloc.start()
    begin = time.thread_time()
    with pytest.raises((CheckpointError, UnsupportedModelError), match=words):
        call(folder)
    assert time.thread_time() - begin < 1
    assert tracemalloc.get_traced_memory()[1] < 4 << 20
    tracemalloc.stop()


@pytest.mark.parametrize("call", [loaded, quantize, load_config])
@pytest.mark.parametrize("layers", [10_001, 10**5, HUGE])
def test_more_layers_than_any_model_has_are_refused(
    call: Callable[[Path], object], layers: int, folder: Path
) -> None:
    """Port of sec_02."""
    change(folder, num_hidden_layers=layers, layer_types=None)
    words = f"num_hidden_layers: got {layers}, expected an integer from 1 to 10000"
    cheaply_refused(call, folder, words)


@pytest.mark.parametrize("call", [loaded, quantize, load_config])
@pytest.mark.parametrize("layers", [1000, 10_000])
def test_more_layers_than_the_files_hold_are_refused(
    call: Callable[[Path], object], layers: int, folder: Path
) -> None:
    change(folder, num_hidden_layers=layers, layer_types=None, dtype=None)
    words = f"model.safetensors: holds .* tensors, too few for num_hidden_layers = {layers} of"
    cheaply_refused(call, folder, words)


@pytest.mark.parametrize("call", [loaded, quantize])
@pytest.mark.parametrize(
    "name",
    ["vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "head_dim"],
)
def test_other_sizes_are_compared_with_the_headers(
    call: Callable[[Path], object], name: str, folder: Path
) -> None:
    change(folder, **{"head_dim": 8, name: 2**30})
    cheaply_refused(call, folder, r"got shape \[.*\], expected \[")


@pytest.mark.parametrize("positions", [2**20 + 1, 10**7, HUGE])
def test_very_long_contexts_must_be_asked_for(positions: int, folder: Path) -> None:
    """Port of sec_03: the RoPE table grows with max_position_embeddings, which no file confirms."""
    change(folder, max_position_embeddings=positions, rope_parameters=None)
    words = f"max_context: got None, .* max_position_embeddings = {positions} .* 1048576"
    tracemalloc.start()
    with pytest.raises(ValueError, match=words):
        load_model(folder)
    assert tracemalloc.get_traced_memory()[1] < 4 << 20
    tracemalloc.stop()
    assert load_model(folder, max_context=16).max_context == 16


def test_contexts_of_a_million_are_the_models_own(tmp_path: Path) -> None:
    folder = save_plain(tmp_path / "m", random_model(MODELS["llama"]))
    change(folder, max_position_embeddings=2**20)
    config = load_config(folder)
    assert config.context(None) == 2**20


def test_generation_serves_what_it_needs_of_a_long_context(tmp_path: Path) -> None:
    from tiny import byte_tokenizer

    folder = save_plain(tmp_path / "m", random_model(MODELS["llama"]))
    change(folder, max_position_embeddings=HUGE, vocab_size=61)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    assert main(["generate", str(folder), "&%", "--max-tokens", "2"]) == 0


def test_the_deepest_model_that_is_read_is_cheap() -> None:
    config = json.loads(MODELS["llama"].to_json_string(use_diff=False))
    begin = time.thread_time()
    assert read_config({**config, "num_hidden_layers": 10_000}).num_layers == 10_000
    assert time.thread_time() - begin < 0.5


@pytest.mark.parametrize(
    "shape",
    ["[" + ",".join(["9" * 4000] * 20_000) + "]", "[" + ",".join(["1"] * 65) + "]", f"[{2**63}]"],
    ids=["product", "dimensions", "size"],
)
def test_shapes_of_a_header_are_bounded(shape: str, tmp_path: Path) -> None:
    folder = save_plain(tmp_path / "m", random_model(MODELS["llama"]))
    header = f'{{"a": {{"dtype": "F32", "shape": {shape}, "data_offsets": [0, 4]}}}}'.encode()
    raw = len(header).to_bytes(8, "little") + header + bytes(4)
    (folder / "model.safetensors").write_bytes(raw)
    with pytest.raises(CheckpointError, match="corrupt safetensors header: a: ") as caught:
        load_model(folder)
    assert len(str(caught.value)) < 1000


NAMES = ["model_type", "hidden_size", "rope_scaling", "quantization_config", "eos_token_id"]


@pytest.mark.parametrize("name", NAMES)
def test_values_of_any_depth_are_refused_by_name(name: str, tmp_path: Path) -> None:
    folder = save_plain(tmp_path / "m", random_model(MODELS["llama"]))
    text = (folder / "config.json").read_text().rstrip().removesuffix("}")
    for depth in range(800, 1000):  # some of which can be read and are too deep to be printed
        value = "[" * depth + "]" * depth
        (folder / "config.json").write_text(f'{text}, "{name}": {value}}}')
        with pytest.raises((CheckpointError, UnsupportedModelError), match=f"{name}|not valid"):
            load_config(folder), load_model(folder)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", ["x" * 10**6, list(range(10**5)), [["x" * 99] * 999] * 9])
def test_values_are_shown_in_short(name: str, value: Any, tmp_path: Path) -> None:
    folder = save_plain(tmp_path / "m", random_model(MODELS["llama"]))
    change(folder, **{name: value})
    with pytest.raises((CheckpointError, UnsupportedModelError), match=f"{name}: got ") as caught:
        load_model(folder)
    assert len(str(caught.value)) < 2000  # of which the names of all families are some 800
