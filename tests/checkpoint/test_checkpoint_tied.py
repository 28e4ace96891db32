"""Checkpoints of models whose output projection is the embedding, stored once or twice."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hf_models import MODELS, TOKENS, config_of, hf_logits, random_model, save, tensors_of
from quantized_files import FORMATS, write_quantized
from safetensors.torch import load_file, save_file, save_model

from ostinato.checkpoint import CheckpointError, load_config, load_model, quantize_checkpoint
from ostinato.models import sequence_logits

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
TIED = ["llama-tied", "qwen2-tied-window", "qwen3-tied"]


@pytest.mark.parametrize("name", TIED)
def test_tied_weights_saved_by_safetensors_load(name: str, tmp_path: Path) -> None:
    """Port of bug_03: `save_model` keeps the name that sorts first."""
    hf = random_model(MODELS[name])
    hf.config.save_pretrained(tmp_path)
    save_model(hf, str(tmp_path / "model.safetensors"))
    stored = load_file(tmp_path / "model.safetensors")
    assert HEAD in stored
    assert EMBEDDING not in stored
    model = load_model(tmp_path)
    assert torch.equal(model.embedding, hf.get_input_embeddings().weight)
    assert model.lm_head.weight is model.embedding
    torch.testing.assert_close(sequence_logits(model, TOKENS), hf_logits(hf), atol=1e-4, rtol=0)


def head_only(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {HEAD if name == EMBEDDING else name: tensor for name, tensor in tensors.items()}


def test_shards_may_hold_the_output_projection_only(tmp_path: Path) -> None:
    hf = random_model(MODELS["llama-tied"])
    tensors = list(head_only(tensors_of(hf)).items())
    save(tmp_path / "m", config_of(hf), dict(tensors[:5]), dict(tensors[5:]))
    assert torch.equal(load_model(tmp_path / "m").embedding, hf.get_input_embeddings().weight)


def test_the_dtype_is_that_of_the_one_stored_copy(tmp_path: Path) -> None:
    hf = random_model(MODELS["llama-tied"])
    config = {name: value for name, value in config_of(hf).items() if "dtype" not in name}
    save(tmp_path, config, head_only(tensors_of(hf, torch.float16)))
    assert load_config(tmp_path).dtype is torch.float16


@pytest.mark.parametrize("scheme", ["int8", "fp8"])
def test_the_quantiser_writes_the_usual_name(scheme: str, tmp_path: Path) -> None:
    hf = random_model(MODELS["llama-tied"])
    folders = {"usual": tensors_of(hf), "head": head_only(tensors_of(hf))}
    for name, tensors in folders.items():
        save(tmp_path / name, config_of(hf), tensors)
        quantize_checkpoint(
            tmp_path / name, tmp_path / f"{name}-out", scheme=scheme, progress=False
        )
    usual, head = (load_file(tmp_path / f"{name}-out" / "model.safetensors") for name in folders)
    assert EMBEDDING in head
    assert HEAD not in head
    assert usual.keys() == head.keys()
    assert all(
        torch.equal(usual[name].view(torch.uint8), head[name].view(torch.uint8)) for name in usual
    )


def test_a_quantised_file_may_hold_the_output_projection_only(tmp_path: Path) -> None:
    write_quantized(tmp_path, random_model(MODELS["llama-tied"]), FORMATS["ct-int8-dynamic"])
    before = load_model(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file(head_only({name: t.clone() for name, t in load_file(file).items()}), file)
    after = load_model(tmp_path)
    for left, right in zip(before.tensors(), after.tensors(), strict=True):
        assert torch.equal(left, right)


def test_a_file_with_neither_copy_is_refused(tmp_path: Path) -> None:
    hf = random_model(MODELS["llama-tied"])
    tensors = tensors_of(hf)
    del tensors[EMBEDDING]
    save(tmp_path, config_of(hf), tensors)
    with pytest.raises(CheckpointError, match=f"missing {EMBEDDING} or {HEAD}$"):
        load_model(tmp_path)


@pytest.mark.parametrize("gone", [EMBEDDING, HEAD])
def test_untied_models_need_both(gone: str, tmp_path: Path) -> None:
    hf = random_model(MODELS["llama"])
    tensors = tensors_of(hf)
    del tensors[gone]
    save(tmp_path, config_of(hf), tensors)
    with pytest.raises(CheckpointError, match=f"missing {gone}$"):
        load_model(tmp_path)


def test_two_copies_that_differ_are_refused(tmp_path: Path) -> None:
    hf = random_model(MODELS["llama-tied"])
    tensors = tensors_of(hf)
    save(tmp_path, config_of(hf), {**tensors, HEAD: tensors[EMBEDDING] + 1})
    with pytest.raises(CheckpointError, match=f"{HEAD}: differs from {EMBEDDING}"):
        load_model(tmp_path)
