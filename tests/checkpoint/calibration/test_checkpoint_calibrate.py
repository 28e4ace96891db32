"""Calibration: scales that move from inputs to weights, exactly, and what INT8 gains by it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import SHAPE, random_model, save_plain
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    LlamaConfig,
    Olmo2Config,
    Phi3Config,
    PreTrainedModel,
    Qwen3Config,
    Starcoder2Config,
)

from ostinato.checkpoint import CheckpointError, load_config, load_model, quantize_checkpoint
from ostinato.checkpoint.calibration.observe import observe, read_tokens
from ostinato.checkpoint.calibration.smooth import smoothing
from ostinato.checkpoint.layout import checked_layout
from ostinato.checkpoint.reader import CheckpointReader
from ostinato.checkpoint.storage.dense import DENSE, unquantized
from ostinato.models import sequence_logits
from tiny import byte_tokenizer

SIZES: dict[str, Any] = {**SHAPE, "vocab_size": 300, "max_position_embeddings": 128}
IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}
MODELS = {
    "llama": LlamaConfig(**SIZES),
    "llama-biases": LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "qwen3": Qwen3Config(**SIZES, head_dim=16),
    "phi3": Phi3Config(**SIZES, **IDS),
    "olmo2": Olmo2Config(**SIZES, **IDS),
    "starcoder2": Starcoder2Config(**SIZES, **IDS),  # layer norms with biases, no gate
}
TEXT = "The import statement combines two operations; it searches for the named module, then binds."
TOKENS = [(7 * i * i + 3) % 300 for i in range(60)]


def with_outliers(model: PreTrainedModel) -> PreTrainedModel:
    """Give some columns of what layers read a far larger range; the model computes what it did."""
    grown, heads = 64.0, model.config.num_attention_heads // model.config.num_key_value_heads
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        if hasattr(layer, "input_layernorm"):  # OLMo 2 has norms behind its layers alone
            readers = {
                layer.input_layernorm: ("q_proj", "k_proj", "v_proj", "qkv_proj"),
                layer.post_attention_layernorm: ("gate_proj", "up_proj", "gate_up_proj", "c_fc"),
            }
            for norm, names in readers.items():
                for parameter in norm.parameters():
                    parameter.data[3::11] *= grown
                for name in names:
                    for part in (attention, mlp):
                        if hasattr(part, name):
                            getattr(part, name).weight.data[:, 3::11] /= grown
        values = getattr(attention, "v_proj", None) or attention.qkv_proj
        kv_size, dim = attention.o_proj.weight.size(1) // heads, attention.head_dim
        sources = [(values, kv_size)]
        if hasattr(mlp, "down_proj"):
            up = getattr(mlp, "up_proj", None) or mlp.gate_up_proj
            sources.append((up, mlp.down_proj.weight.size(1)))
            mlp.down_proj.weight.data[:, 5::13] /= grown
        for source, size in sources:
            source.weight.data[-size:][5::13] *= grown
            if source.bias is not None:
                source.bias.data[-size:][5::13] *= grown
        columns = torch.ones(kv_size)
        columns[5::13] = grown
        attention.o_proj.weight.data /= (
            columns.view(-1, 1, dim).expand(-1, heads, dim).reshape(1, -1)
        )
    return model


@pytest.fixture(params=MODELS)
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Give a folder with a plain model whose inputs have outliers, and its tokenizer."""
    folder = save_plain(tmp_path / "plain", with_outliers(random_model(MODELS[request.param])))
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    (tmp_path / "text.txt").write_text(TEXT)
    return folder


def factors_of(source: Path) -> Any:
    config = load_config(source)
    tokens = read_tokens(source.parent / "text.txt", source, config.vocab_size)
    with CheckpointReader(source) as reader:
        layout = checked_layout(config, unquantized)
        reader.check(layout.tensors(unquantized))
        observed = observe(reader, config, layout, unquantized, tokens)
        return smoothing(
            layout, observed.inputs, lambda m: reader.read(DENSE.weight(m)).clone(), lambda _: True
        )


def test_smoothing_changes_no_bit_of_the_logits(source: Path, tmp_path: Path) -> None:
    factors = factors_of(source)
    assert factors.rows
    assert factors.columns
    for values in (*factors.rows.values(), *factors.columns.values()):
        assert (torch.frexp(values).mantissa == 0.5).all()
    tensors = load_file(source / "model.safetensors")
    changed = {name: factors.apply(name, tensor) for name, tensor in tensors.items()}
    assert sum(not torch.equal(changed[name], tensors[name]) for name in tensors) >= 6
    target = tmp_path / "smooth"
    target.mkdir()
    (target / "config.json").write_text((source / "config.json").read_text())
    save_file(changed, target / "model.safetensors")
    logits = [sequence_logits(load_model(folder), TOKENS) for folder in (source, target)]
    assert torch.equal(*logits)


def test_calibration_takes_outliers_back(source: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    config = AutoConfig.from_pretrained(source)
    even = save_plain(tmp_path / "even", random_model(type(config)(**config.to_dict())))
    exact = sequence_logits(load_model(source), TOKENS)
    errors = []
    for folder, name, how in (
        (even, "even8", {}),
        (source, "plain8", {}),
        (source, "smooth8", {"calibrate": text}),
    ):
        quantize_checkpoint(folder, tmp_path / name, scheme="int8", progress=False, **how)
        found = sequence_logits(load_model(tmp_path / name), TOKENS)
        errors.append(float((found - exact).square().mean().sqrt()))
    without, lost, regained = errors
    assert lost > 3 * without
    assert regained < 1.5 * without


def test_what_is_not_quantized_is_not_smoothed(tmp_path: Path) -> None:
    source = save_plain(tmp_path / "plain", with_outliers(random_model(MODELS["llama"])))
    byte_tokenizer().save(str(source / "tokenizer.json"))
    (tmp_path / "text.txt").write_text(TEXT)
    quantize_checkpoint(
        *(source, tmp_path / "dst"),
        scheme="int8",
        ignore=["lm_head", "re:.*self_attn.*", "re:.*layers.1.*"],
        calibrate=tmp_path / "text.txt",
        progress=False,
    )
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("plain", "dst"))
    kept = [name for name in before if "self_attn" in name or "layers.1" in name]
    assert all(torch.equal(before[name], after[name]) for name in kept)
    assert torch.equal(*(t["model.layers.0.input_layernorm.weight"] for t in (before, after)))
    norms = [t["model.layers.0.post_attention_layernorm.weight"] for t in (before, after)]
    assert not torch.equal(*norms)


@pytest.mark.parametrize(
    ("scheme", "text", "error", "words"),
    [
        ("fp8", TEXT.encode(), ValueError, "calibrate: got a text for 'fp8', expected None"),
        ("int8", b"short", ValueError, r"calibrate: got 5 tokens in .*, expected at least 64"),
        ("int8", b"\xff" * 99, ValueError, "calibrate: .*: no UTF-8"),
        ("int8", None, CheckpointError, "text.txt: cannot be read"),
    ],
)
def test_bad_texts_are_refused(
    scheme: str, text: bytes | None, error: type[Exception], words: str, tmp_path: Path
) -> None:
    source = save_plain(tmp_path / "plain", random_model(MODELS["llama"]))
    byte_tokenizer().save(str(source / "tokenizer.json"))
    if text is not None:
        (tmp_path / "text.txt").write_bytes(text)
    how: dict[str, Any] = {"scheme": scheme, "calibrate": tmp_path / "text.txt"}
    with pytest.raises(error, match=words):
        quantize_checkpoint(source, tmp_path / "dst", **how)
    assert not (tmp_path / "dst").exists()


def test_tokens_beyond_the_vocabulary_are_refused(tmp_path: Path) -> None:
    source = save_plain(tmp_path / "plain", random_model(LlamaConfig(**SHAPE)))
    byte_tokenizer().save(str(source / "tokenizer.json"))
    (tmp_path / "text.txt").write_text(TEXT)
    with pytest.raises(ValueError, match=r"calibrate: got token \d+ of tokenizer.json, expected"):
        quantize_checkpoint(
            source, tmp_path / "dst", scheme="int8", calibrate=tmp_path / "text.txt"
        )


def test_a_checkpoint_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    source = save_plain(tmp_path / "plain", random_model(MODELS["llama"]))
    (tmp_path / "text.txt").write_text(TEXT)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        quantize_checkpoint(
            source, tmp_path / "dst", scheme="int8", calibrate=tmp_path / "text.txt"
        )
