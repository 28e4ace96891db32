"""Loaded models against transformers: plain ones exactly, quantised ones through a twin."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hf_models import MODELS, TOKENS, hf_logits, random_model, save_plain
from quantized_files import FORMATS, sturdy_tokens, write_quantized

from ostinato.checkpoint import load_model
from ostinato.models import sequence_logits


@pytest.mark.parametrize("name", MODELS)
def test_plain_logits_equal_those_of_transformers(
    name: str, device: torch.device, tmp_path: Path
) -> None:
    model = random_model(MODELS[name])
    ours = sequence_logits(load_model(save_plain(tmp_path, model), device=device), TOKENS)
    theirs = hf_logits(model)
    assert theirs.std() > 0.5
    assert (ours.cpu() - theirs).abs().max() <= 1e-4


@pytest.mark.parametrize(
    ("name", "format_name"),
    [
        *(("llama-biases", format_name) for format_name in FORMATS),
        ("mistral", "hf-fp8-static"),
        ("qwen2-tied-window", "ct-int8-dynamic"),
        ("qwen3", "ct-int8-asymmetric"),
    ],
)
def test_quantized_logits_equal_those_of_a_fake_quantized_twin(
    name: str, format_name: str, device: torch.device, tmp_path: Path
) -> None:
    model = random_model(MODELS[name])
    twin = write_quantized(tmp_path, model, FORMATS[format_name]).twin()
    tokens = sturdy_tokens(twin)
    ours = sequence_logits(load_model(tmp_path, device=device), tokens).cpu()
    theirs = hf_logits(twin, tokens)
    quantization_error = float((theirs - hf_logits(model, tokens)).abs().max())
    assert quantization_error > 0.01, "nothing was quantised"
    # Codes are equal, products of codes exact: only fp32 additions differ, as in a plain model.
    # Not so FP8 on Hopper, whose tensor cores add with about 13 bits of fraction: now and then
    # a later activation gets another code, and with it an error as quantisation itself makes.
    imprecise = device.type == "cuda" and FORMATS[format_name].dtype is torch.float8_e4m3fn
    tolerance = quantization_error if imprecise else 1e-4
    assert (ours - theirs).abs().max() <= tolerance
