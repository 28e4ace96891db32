"""docs/how-to/add-a-weight-format.md, followed: one file makes a format that loads."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hf_models import MODELS, TOKENS, random_model
from page_blocks import code_blocks
from quantized_files import FORMATS, write_quantized
from safetensors.torch import load_file, save_file

from ostinato.checkpoint import UnsupportedCheckpointError, formats, load_model, quantization
from ostinato.models import sequence_logits

NAME = "toy_int8"
SCALE = ".weight_scale"


@pytest.fixture
def toy_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Put the page's file into the folder of formats, for a test."""
    (code,) = code_blocks("docs/how-to/add-a-weight-format.md")
    folder = tmp_path / "formats"
    folder.mkdir()
    (folder / f"{NAME}.py").write_text(code)
    monkeypatch.setattr(formats, "__path__", [*formats.__path__, str(folder)])
    quantization.formats.cache_clear()
    yield
    sys.modules.pop(f"ostinato.checkpoint.formats.{NAME}", None)
    quantization.formats.cache_clear()


def write(tmp_path: Path, **fields: object) -> tuple[Path, Path]:
    """Write the same weights in compressed-tensors and in the toy format; return both folders."""
    known, toy = tmp_path / "known", tmp_path / "toy"
    form = FORMATS["ct-int8-dynamic-tensor-weights"]
    write_quantized(known, random_model(MODELS["llama"]), form)
    toy.mkdir()
    tensors = load_file(known / "model.safetensors")
    kept = {
        name.replace(SCALE, ".wscale"): tensor.reshape(1) if name.endswith(SCALE) else tensor
        for name, tensor in tensors.items()
    }
    save_file(kept, toy / "model.safetensors")
    config = json.loads((known / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "toy-int8", "skip": ["lm_head"], **fields}
    (toy / "config.json").write_text(json.dumps(config))
    return known, toy


@pytest.mark.usefixtures("toy_format")
def test_the_example_gives_the_bits_of_the_same_weights(tmp_path: Path) -> None:
    known, toy = (sequence_logits(load_model(path), TOKENS) for path in write(tmp_path))
    assert torch.equal(known, toy)


@pytest.mark.usefixtures("toy_format")
def test_the_example_refuses_fields_it_does_not_know(tmp_path: Path) -> None:
    _, toy = write(tmp_path, group_size=64)
    with pytest.raises(UnsupportedCheckpointError, match="group_size: got 64, a field that is not"):
        load_model(toy)


def test_without_the_file_there_is_no_such_format(tmp_path: Path) -> None:
    _, toy = write(tmp_path)
    with pytest.raises(UnsupportedCheckpointError, match="quant_method: got 'toy-int8', expected"):
        load_model(toy)
