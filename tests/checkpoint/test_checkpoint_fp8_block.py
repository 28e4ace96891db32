"""Checkpoints with FP8 weights in blocks: logits, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from block_files import (
    BLOCK,
    FORMATS,
    MODELS,
    WHOLE_BLOCKS,
    BlockFormat,
    compressed_tensors,
    hf,
    write_blocks,
)
from hf_models import hf_logits, random_model, save_plain
from quantized_files import sturdy_tokens
from transformers import AutoModelForCausalLM

from ostinato.checkpoint import (
    CheckpointError,
    UnsupportedCheckpointError,
    load_model,
    quantize_checkpoint,
)
from ostinato.models import BlockFP8Linear, DenseLinear, sequence_logits


@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_those_of_a_fake_quantized_twin(
    name: str, format_name: str, device: torch.device, tmp_path: Path
) -> None:
    model = random_model(MODELS[name])
    twin = write_blocks(tmp_path, model, FORMATS[format_name]).twin()
    tokens = sturdy_tokens(twin, 2)
    ours = sequence_logits(load_model(tmp_path, device=device), tokens).cpu()
    theirs = hf_logits(twin, tokens)
    quantization_error = float((theirs - hf_logits(model, tokens)).abs().max())
    assert quantization_error > 0.01, "nothing was quantised"
    # As in test_checkpoint_logits.py: tensor cores add with about 13 bits of fraction.
    tolerance = quantization_error if device.type == "cuda" else 1e-4
    assert (ours - theirs).abs().max() <= tolerance


def test_logits_equal_those_of_compressed_tensors(tmp_path: Path) -> None:
    written = write_blocks(tmp_path, random_model(WHOLE_BLOCKS), FORMATS["compressed-tensors"])
    tokens = sturdy_tokens(written.twin(), 1)
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager"
    )
    ours = sequence_logits(load_model(tmp_path), tokens)
    torch.testing.assert_close(ours, hf_logits(theirs, tokens), rtol=0.0, atol=1e-4)


def test_every_module_keeps_its_own_blocks(tmp_path: Path) -> None:
    """Of q, k and v, whose rows are no multiples of a block, each row has its module's scale."""
    written = write_blocks(tmp_path, random_model(MODELS["qwen3"]), FORMATS["hf-minimax"])
    layer = load_model(tmp_path).layers[1].qkv
    assert isinstance(layer, BlockFP8Linear)
    expected = torch.cat(
        [
            written.modules[f"model.layers.1.self_attn.{name}_proj"][1].repeat_interleave(BLOCK, 0)[
                :rows
            ]
            for name, rows in (("q", 160), ("k", 80), ("v", 80))
        ]
    )
    got = layer.weight_scale.t().repeat_interleave(8, 0)
    assert torch.equal(got, expected)
    assert len(expected.unique()) == 2 * (2 + 1 + 1)


def test_modules_not_converted_stay_in_16_bits(tmp_path: Path) -> None:
    write_blocks(tmp_path, random_model(MODELS["llama"]), FORMATS["hf"])
    model = load_model(tmp_path)
    assert isinstance(model.layers[0].down, DenseLinear)
    assert isinstance(model.layers[1].down, BlockFP8Linear)
    assert isinstance(model.lm_head, DenseLinear)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (hf(weight_block_size=[64, 128]), r"weight_block_size: got \[64, 128\], expected \[128"),
        (hf(weight_block_size=[1, 128]), "weight_block_size: got"),
        (hf(activation_scheme="static"), "activation_scheme: got 'static', expected 'dynamic'"),
        (hf(fmt="e5m2"), "fmt: got 'e5m2'"),
        (hf(scale_fmt="e4m3"), "scale_fmt: got 'e4m3', expected 'float' or 'ue8m0'"),
        ({"quant_method": "fp8", "activation_scheme": "dynamic", "scale_fmt": "ue8m0"}, "scale_f"),
        (compressed_tensors({"block_structure": [128, 64]}), "block_structure: got"),
        (compressed_tensors({"num_bits": 4}), "num_bits: got 4"),
        (compressed_tensors({"type": "int"}), "type: got 'int', expected 'float'"),
        (compressed_tensors({"symmetric": False}), "symmetric: got False"),
        (compressed_tensors({"zeros": "many"}), "zeros: got 'many'"),
        (compressed_tensors(None, {"strategy": "token"}), "strategy: got 'token', expected 'gr"),
        (compressed_tensors(None, {"group_size": 64}), "group_size: got 64, expected 128"),
        (compressed_tensors(None, {"dynamic": False}), "dynamic: got False, expected True"),
        (compressed_tensors({"strategy": "channel"}), "block_structure: got"),
        (
            {"quant_method": "modelopt", "quant_algo": "FP8_PB_WO", "group_size": 64},
            "group_size: got 64",
        ),
    ],
)
def test_what_is_not_supported_is_refused(
    config: dict[str, Any], words: str, tmp_path: Path
) -> None:
    form = BlockFormat(config, suffix="weight_scale")
    write_blocks(tmp_path, random_model(MODELS["llama"]), form)
    with pytest.raises(UnsupportedCheckpointError, match=words):
        load_model(tmp_path)


_SCALE = "model.layers.1.mlp.up_proj.weight_scale_inv"


@pytest.mark.parametrize(
    ("scale", "words"),
    [
        (None, f"{_SCALE}: missing|missing.*{_SCALE}|{_SCALE}"),
        (torch.ones(3, 3), f"{_SCALE}.*shape|shape.*{_SCALE}"),
        (torch.ones(3), "shape"),
        (torch.ones(2, 2).int(), "dtype"),
        (torch.tensor([[1.0, 2.0], [torch.nan, 1.0]]), "got nan at index 2"),
        (torch.full((2, 2), -1.0), "got -1.0 at index 0"),
    ],
)
def test_bad_scales_are_refused(scale: torch.Tensor | None, words: str, tmp_path: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        del tensors[_SCALE]
        if scale is not None:
            tensors[_SCALE] = scale

    write_blocks(tmp_path, random_model(MODELS["llama"]), FORMATS["hf-minimax"], change)
    with pytest.raises(CheckpointError, match=words):
        load_model(tmp_path)


@pytest.mark.parametrize("name", MODELS)
def test_quantize_writes_what_it_says(name: str, tmp_path: Path) -> None:
    plain = random_model(MODELS[name])
    source, target = tmp_path / "plain", tmp_path / "blocks"
    source.mkdir()
    save_plain(source, plain)
    quantize_checkpoint(source, target, scheme="fp8-block", progress=False)
    written = json.loads((target / "config.json").read_text())["quantization_config"]
    group = written["config_groups"]["group_0"]
    assert group["weights"]["block_structure"] == [BLOCK, BLOCK]
    assert group["input_activations"]["group_size"] == BLOCK

    expected = tmp_path / "expected"
    expected.mkdir()
    form = FORMATS["compressed-tensors"]
    twin = write_blocks(
        expected, plain, BlockFormat(form.config, torch.float32, form.suffix)
    ).twin()
    tokens = sturdy_tokens(twin, 2)
    ours = sequence_logits(load_model(target), tokens)
    assert (ours - hf_logits(twin, tokens)).abs().max() <= 1e-4


def test_a_head_in_blocks_returns_fp32(tmp_path: Path) -> None:
    model = random_model(MODELS["llama"])
    form = FORMATS["hf-minimax"]
    config = {**compressed_tensors(), "ignore": []}
    written = write_blocks(
        tmp_path, model, BlockFormat(config, form.scale_dtype, "weight_scale", skipped=())
    )
    loaded = load_model(tmp_path, dtype=torch.bfloat16)
    assert isinstance(loaded.lm_head, BlockFP8Linear)
    assert loaded.lm_head.out_dtype is torch.float32
    tokens = sturdy_tokens(written.twin(), 2)
    ours = sequence_logits(load_model(tmp_path), tokens)
    assert (ours - hf_logits(written.twin(), tokens)).abs().max() <= 1e-4
