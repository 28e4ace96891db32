"""Loaded models against transformers: plain ones exactly, quantised ones through a twin."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hf_models import MODELS, TOKENS, hf_logits, random_model, save_plain
from quantized_files import FORMATS, FUSED, SPELLINGS, sturdy_tokens, write_quantized
from transformers import AutoModelForCausalLM

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
        *(("llama-biases", format_name) for format_name in (*FORMATS, *SPELLINGS)),
        ("mistral", "hf-fp8-static"),
        ("qwen2-tied-window", "ct-int8-dynamic"),
        ("qwen3", "ct-int8-asymmetric"),
        ("olmo2", "ct-int8-asymmetric-dynamic"),
    ],
)
def test_quantized_logits_equal_those_of_a_fake_quantized_twin(
    name: str, format_name: str, device: torch.device, tmp_path: Path
) -> None:
    model = random_model(MODELS[name])
    form = {**FORMATS, **SPELLINGS}[format_name]
    twin = write_quantized(tmp_path, model, form).twin()
    tokens = sturdy_tokens(twin)
    ours = sequence_logits(load_model(tmp_path, device=device), tokens).cpu()
    theirs = hf_logits(twin, tokens)
    quantization_error = float((theirs - hf_logits(model, tokens)).abs().max())
    assert quantization_error > 0.01, "nothing was quantised"
    # Codes are equal, products of codes exact: only fp32 additions differ, as in a plain model.
    # Not so FP8 on Hopper, whose tensor cores add with about 13 bits of fraction: now and then
    # a later activation gets another code, and with it an error as quantisation itself makes.
    imprecise = device.type == "cuda" and form.dtype is torch.float8_e4m3fn
    tolerance = quantization_error if imprecise else 1e-4
    assert (ours - theirs).abs().max() <= tolerance


# A dynamic INT8 scale of compressed-tensors is amax / 127.5, ours amax / 127: there codes differ.
@pytest.mark.parametrize(
    "format_name",
    ["ct-int8-static", "ct-int8-asymmetric", "ct-fp8-static", "ct-int8-asymmetric-dynamic"],
)
def test_logits_equal_those_of_compressed_tensors(format_name: str, tmp_path: Path) -> None:
    plain = random_model(MODELS["llama-biases"])
    # One range for modules that are joined, half of what is seen: many activations saturate.
    names = (*(name for group in FUSED for name in group), "o_proj", "down_proj")
    margins = dict.fromkeys(names, 0.5)
    form = {**FORMATS, **SPELLINGS}[format_name]
    tokens = sturdy_tokens(write_quantized(tmp_path, plain, form, margins).twin())
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager"
    )
    ours = sequence_logits(load_model(tmp_path), tokens)
    torch.testing.assert_close(ours, hf_logits(theirs, tokens), rtol=0.0, atol=1e-4)
