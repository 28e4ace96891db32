"""docs/how-to/add-a-model.md, followed: one file makes a family that loads and computes."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import MODELS, TOKENS, hf_logits, random_model, save_plain
from page_blocks import code_blocks

from ostinato.checkpoint import load_model
from ostinato.models import UnsupportedModelError, families, registry, sequence_logits

NAME = "scaled_llama"


@pytest.fixture
def family(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Put the page's file into the folder of families, for a test."""
    (code,) = code_blocks("docs/how-to/add-a-model.md")
    folder = tmp_path / "families"
    folder.mkdir()
    (folder / f"{NAME}.py").write_text(code)
    registry.families()
    monkeypatch.setattr(families, "__path__", [*families.__path__, str(folder)])
    registry._discover.cache_clear()
    yield
    registry._families.pop(NAME, None)
    sys.modules.pop(f"ostinato.models.families.{NAME}", None)
    registry._discover.cache_clear()


def save(folder: Path, **fields: object) -> Any:
    """Save a random Llama as one of the family; return transformers' with scaled embeddings."""
    model: Any = random_model(MODELS["llama"])
    save_plain(folder, model)
    file = folder / "config.json"
    config = {**json.loads(file.read_text()), "model_type": NAME, **fields}
    config["architectures"] = ["ScaledLlamaForCausalLM"]
    file.write_text(json.dumps(config))
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(model.config.hidden_size**0.5)
    return model


@pytest.mark.usefixtures("family")
def test_the_example_gives_the_logits_of_its_twin(tmp_path: Path) -> None:
    twin = save(tmp_path / "model")
    model = load_model(tmp_path / "model")
    ours = sequence_logits(model, TOKENS)
    assert torch.allclose(ours, hf_logits(twin, TOKENS), atol=1e-4)
    unscaled = load_model_as_llama(tmp_path / "model")
    assert not torch.allclose(ours, unscaled, atol=1e-2)


def load_model_as_llama(folder: Path) -> torch.Tensor:
    """Return the logits that Llama itself gives for the same weights."""
    file = folder / "config.json"
    config = {**json.loads(file.read_text()), "model_type": "llama"}
    config["architectures"] = ["LlamaForCausalLM"]
    file.write_text(json.dumps(config))
    return sequence_logits(load_model(folder), TOKENS)


@pytest.mark.usefixtures("family")
def test_the_example_refuses_what_it_does_not_know(tmp_path: Path) -> None:
    save(tmp_path / "model", hidden_act="relu")
    with pytest.raises(UnsupportedModelError, match="hidden_act: got 'relu', expected 'silu'"):
        load_model(tmp_path / "model")


def test_without_the_file_there_is_no_such_family(tmp_path: Path) -> None:
    save(tmp_path / "model")
    with pytest.raises(UnsupportedModelError, match="model_type: got 'scaled_llama', expected"):
        load_model(tmp_path / "model")
