"""Static scales of an 8-bit KV cache: found by a text, and written as compressed-tensors does."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import MODELS, random_model, save_plain
from quantized_files import FORMATS, write_quantized
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedModel

from ostinato.checkpoint import (
    CheckpointError,
    UnsupportedCheckpointError,
    load_config,
    load_model,
    quantize_checkpoint,
)
from ostinato.checkpoint.calibration import observe as calibration
from ostinato.checkpoint.calibration.observe import observe, read_tokens
from ostinato.checkpoint.calibration.smooth import smoothing
from ostinato.checkpoint.layout import checked_layout
from ostinato.checkpoint.reader import CheckpointReader
from ostinato.checkpoint.storage.dense import DENSE, unquantized
from ostinato.engine import Engine
from ostinato.models import Decoder, KVFormat, PagedKVCache, kv_format, sequence_logits
from ostinato.models.scoring import sequence_inputs

NUMBERS = [(11 * index * index + 5) % 61 for index in range(150)]  # more than the context of 64
LIMITS = {"fp8": (torch.float8_e4m3fn, 448.0), "int8": (torch.int8, 127.5)}


def number_tokenizer(vocabulary: int = 61) -> Tokenizer:
    words = {str(token): token for token in range(vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = save_plain(tmp_path / "source", random_model(MODELS["llama"]))
    number_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "text.txt"
    file.write_text(" ".join(map(str, NUMBERS)))
    return file


def largest(model: Decoder, pieces: list[list[int]]) -> torch.Tensor:
    """Return the largest magnitudes [layers, 2] that pieces leave in a cache of the model."""
    found = []
    for piece in pieces:
        cache = PagedKVCache.for_model(
            model.config,
            num_pages=40,
            page_size=4,
            device="cpu",
            kv_format=KVFormat(model.config.dtype),
        )
        model(*sequence_inputs(cache, piece), cache)
        found.append(cache.storage.abs().amax(dim=(2, 3, 4, 5)).float())
    return torch.stack(found).amax(0)


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def outliers_in_values(model: PreTrainedModel) -> PreTrainedModel:
    """Give some columns of values a far larger range."""
    for layer in model.model.layers:
        attention = layer.self_attn
        values = getattr(attention, "v_proj", None) or attention.qkv_proj
        kv_size = model.config.num_key_value_heads * attention.head_dim
        values.weight.data[-kv_size:][5::13] *= 64
    return model


def smoothed(source: Path, text: Path, target: Path) -> Path:
    """Write the checkpoint with weights that a text smooths, but does not quantise."""
    config = load_config(source)
    tokens = read_tokens(text, source, config.vocab_size)
    with CheckpointReader(source) as reader:
        layout = checked_layout(config, unquantized)
        reader.check(layout.tensors(unquantized))
        inputs = observe(reader, config, layout, unquantized, tokens).inputs
        factors = smoothing(
            layout, inputs, lambda m: reader.read(DENSE.weight(m)).clone(), lambda _: True
        )
    shutil.copytree(source, target)
    changed = {name: factors.apply(name, tensor) for name, tensor in tensors_of(source).items()}
    save_file(changed, target / "model.safetensors")
    return target


@pytest.mark.parametrize("scheme", [None, "fp8", "fp8-block"])
@pytest.mark.parametrize("kv_cache", LIMITS)
def test_scales_are_the_largest_magnitudes_of_a_text(
    kv_cache: str, scheme: str | None, source: Path, text: Path, tmp_path: Path
) -> None:
    target = tmp_path / "target"
    quantize_checkpoint(source, target, scheme=scheme, kv_cache=kv_cache, calibrate=text)
    pieces = [NUMBERS[at : at + 64] for at in range(0, len(NUMBERS), 64)]
    dtype, limit = LIMITS[kv_cache]
    expected = largest(load_model(source), pieces) / limit
    found = load_model(target).kv_scales
    assert found is not None
    assert found.dtype is dtype
    assert found.k is not None
    assert found.v is not None
    torch.testing.assert_close(torch.stack([found.k, found.v], dim=1), expected, rtol=1e-5, atol=0)
    before, after = (load_file(folder / "model.safetensors") for folder in (source, target))
    assert {name for name in after if name.endswith(("k_scale", "v_scale"))} == {
        f"model.layers.{layer}.self_attn.{part}_scale" for layer in range(2) for part in "kv"
    }
    assert {name for name in before if name not in after} == set()


def test_the_longer_text_has_the_larger_scales(source: Path, text: Path, tmp_path: Path) -> None:
    short = tmp_path / "short.txt"
    short.write_text("1 2 " * 32)
    text.write_text("1 2 " * 32 + text.read_text())
    scales = []
    for file in (short, text):
        target = tmp_path / f"target-{file.stem}"
        quantize_checkpoint(source, target, kv_cache="int8", calibrate=file, progress=False)
        found = load_model(target).kv_scales
        assert found is not None
        assert found.k is not None
        assert found.v is not None
        scales.append(torch.stack([found.k, found.v]))
    assert (scales[1] >= scales[0]).all()
    assert (scales[1] > scales[0]).any()


@pytest.mark.parametrize("kv_cache", LIMITS)
@pytest.mark.parametrize("name", ["llama", "qwen3", "phi3", "cohere"])
def test_scales_are_those_of_a_smoothed_model(
    name: str, kv_cache: str, text: Path, tmp_path: Path
) -> None:
    source = save_plain(tmp_path / "source", outliers_in_values(random_model(MODELS[name])))
    number_tokenizer().save(str(source / "tokenizer.json"))
    smooth = smoothed(source, text, tmp_path / "smooth")
    target = tmp_path / "target"
    quantize_checkpoint(
        source, target, scheme="int8", kv_cache=kv_cache, calibrate=text, progress=False
    )
    pieces = [NUMBERS[at : at + 64] for at in range(0, len(NUMBERS), 64)]
    before, after = (largest(load_model(folder), pieces) for folder in (source, smooth))
    assert torch.equal(before[:, 0], after[:, 0])
    assert torch.equal(before[:, 1], after[:, 1]) == (name == "cohere")
    found = load_model(target).kv_scales
    assert found is not None
    assert found.k is not None
    assert found.v is not None
    assert torch.equal(torch.stack([found.k, found.v], 1), after / LIMITS[kv_cache][1])


def test_without_a_kv_cache_no_scales_are_written(source: Path, text: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    quantize_checkpoint(source, target, scheme="int8", calibrate=text, progress=False)
    assert not any(name.endswith(("k_scale", "v_scale")) for name in tensors_of(target))
    assert load_model(target).kv_scales is None


def test_one_pass_over_the_text_serves_both(
    source: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    def counted(self: Decoder, tokens: torch.Tensor, *rest: Any) -> Any:
        calls.append(len(tokens))
        return hidden(self, tokens, *rest)

    kind = type(load_model(source))
    hidden = kind.hidden
    monkeypatch.setattr(kind, "hidden", counted)
    quantize_checkpoint(
        source, tmp_path / "both", scheme="int8", kv_cache="fp8", calibrate=text, progress=False
    )
    assert calls == [64, 64, 22]
    quantize_checkpoint(source, tmp_path / "weights", scheme="int8", calibrate=text, progress=False)
    both, weights = (tensors_of(tmp_path / name) for name in ("both", "weights"))
    assert all(torch.equal(both[name], tensor) for name, tensor in weights.items())
    # e4m3 gains nothing by factors: its weights are those without a text.
    for name, how in (("fp8", {"kv_cache": "fp8", "calibrate": text}), ("plain", {})):
        quantize_checkpoint(source, tmp_path / name, scheme="fp8", progress=False, **how)
    fp8, plain = (tensors_of(tmp_path / name) for name in ("fp8", "plain"))
    for name, tensor in plain.items():
        assert torch.equal(fp8[name].view(torch.uint8), tensor.view(torch.uint8))


@pytest.mark.parametrize("form", sorted(name for name in FORMATS if name.startswith("ct-")))
def test_quantised_weights_stay_beside_scales_of_a_cache(
    form: str, source: Path, text: Path, tmp_path: Path
) -> None:
    shutil.rmtree(source)
    write_quantized(source, random_model(MODELS["llama"]), FORMATS[form])
    number_tokenizer().save(str(source / "tokenizer.json"))
    target = tmp_path / "target"
    quantize_checkpoint(source, target, kv_cache="int8", calibrate=text)
    before, after = (load_file(folder / "model.safetensors") for folder in (source, target))
    assert set(after) - set(before) == {
        f"model.layers.{layer}.self_attn.{part}_scale" for layer in range(2) for part in "kv"
    }
    for name, tensor in before.items():
        assert torch.equal(after[name].view(torch.uint8), tensor.view(torch.uint8))
    model, plain = load_model(target), load_model(source)
    stored = KVFormat(model.config.dtype)
    expected = sequence_logits(plain, NUMBERS[:40])
    assert torch.equal(sequence_logits(model, NUMBERS[:40], cache_format=stored), expected)
    assert model.kv_scales is not None
    with pytest.raises(UnsupportedCheckpointError, match=r"kv_cache_scheme: got .* already"):
        quantize_checkpoint(target, tmp_path / "again", kv_cache="int8", calibrate=text)


@pytest.mark.parametrize(("form", "scheme"), [("hf-fp8-static", None), ("ct-int8-dynamic", "fp8")])
def test_other_quantised_checkpoints_are_refused(
    form: str, scheme: str | None, source: Path, text: Path, tmp_path: Path
) -> None:
    shutil.rmtree(source)
    write_quantized(source, random_model(MODELS["llama"]), FORMATS[form])
    with pytest.raises(UnsupportedCheckpointError, match=r"is quantised already .*; expected a pl"):
        quantize_checkpoint(
            source, tmp_path / "target", scheme=scheme, kv_cache="fp8", calibrate=text
        )


@pytest.mark.parametrize("kv_cache", LIMITS)
@pytest.mark.parametrize("scheme", [None, "int8"])
def test_an_engine_serves_the_result_in_8_bits(
    kv_cache: str, scheme: str | None, source: Path, text: Path, tmp_path: Path
) -> None:
    target = tmp_path / "target"
    quantize_checkpoint(source, target, scheme=scheme, kv_cache=kv_cache, calibrate=text)
    model = load_model(target)
    engine = Engine(model, number_tokenizer(), max_batch=2, max_context=32)
    words = f"KV cache: {kv_cache}, static scales of the checkpoint per layer"
    assert words in str(engine.capture(progress=False))
    assert engine.cache.storage.dtype is LIMITS[kv_cache][0]
    served = sequence_logits(model, NUMBERS[:40])
    plain = kv_format(model.config, model.kv_scales, "fp32")
    exact = sequence_logits(model, NUMBERS[:40], cache_format=plain)
    assert not torch.equal(served, exact)
    # Weights that are random pass on what e4m3 rounds off, up to 1/16 of a number.
    most = 0.2 if kv_cache == "fp8" else 0.05
    assert (served - exact).std() < most * exact.std()


def test_the_configuration_is_one_of_compressed_tensors(
    source: Path, text: Path, tmp_path: Path
) -> None:
    package = pytest.importorskip("compressed_tensors.quantization")
    for scheme in (None, "fp8"):
        target = tmp_path / f"target-{scheme}"
        quantize_checkpoint(source, target, scheme=scheme, kv_cache="fp8", calibrate=text)
        written = json.loads((target / "config.json").read_text())["quantization_config"]
        read = package.QuantizationConfig.model_validate(written)
        assert read.kv_cache_scheme.num_bits == 8
        assert read.kv_cache_scheme.type == "float"
        assert read.kv_cache_scheme.strategy == "tensor"
        assert read.kv_cache_scheme.symmetric
        assert not read.kv_cache_scheme.dynamic
        assert (read.format == "dense") == (scheme is None)


def test_transformers_reads_the_same_scales(source: Path, text: Path, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    from transformers import AutoModelForCausalLM

    target = tmp_path / "target"
    quantize_checkpoint(source, target, scheme="int8", kv_cache="fp8", calibrate=text)
    ours = load_model(target).kv_scales
    assert ours is not None
    assert ours.k is not None
    theirs = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    scales = [layer.self_attn.k_scale.item() for layer in theirs.model.layers]
    assert scales == pytest.approx(ours.k.tolist())


@pytest.mark.parametrize(
    ("contents", "match"),
    [
        (b"", "calibrate: got 0 tokens in .*text.txt, expected at least 64"),
        (b"   \n", "calibrate: got 0 tokens in .*text.txt"),
        (b"\xff\xfe1 2", "calibrate: .*text.txt: no UTF-8"),
        (None, "text.txt: cannot be read"),
    ],
)
def test_texts_that_are_none_are_named(
    contents: bytes | None, match: str, source: Path, text: Path, tmp_path: Path
) -> None:
    text.unlink()
    if contents is not None:
        text.write_bytes(contents)
    with pytest.raises(ValueError, match=match):
        quantize_checkpoint(source, tmp_path / "target", kv_cache="fp8", calibrate=text)
    assert not (tmp_path / "target").exists()


def test_a_fifo_is_refused_at_once(source: Path, text: Path, tmp_path: Path) -> None:
    text.unlink()
    os.mkfifo(text)
    with pytest.raises(CheckpointError, match=r"text\.txt: got a FIFO, expected a regular file"):
        quantize_checkpoint(source, tmp_path / "target", scheme="int8", calibrate=text)


def test_the_beginning_of_a_long_text_counts(
    source: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vocabulary = load_config(source).vocab_size
    assert read_tokens(text, source, vocabulary) == NUMBERS
    monkeypatch.setattr(calibration, "_MAX_TOKENS", 100)
    assert read_tokens(text, source, vocabulary) == NUMBERS[:100]
    monkeypatch.setattr(calibration, "_MAX_BYTES", 256)
    text.write_text("1 " * 127 + "1é")  # whose last character is cut
    assert read_tokens(text, source, vocabulary) == [1] * 100


def test_a_checkpoint_without_a_tokenizer_is_named(
    source: Path, text: Path, tmp_path: Path
) -> None:
    (source / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        quantize_checkpoint(source, tmp_path / "target", kv_cache="fp8", calibrate=text)


def test_a_tokenizer_of_another_vocabulary_is_named(
    source: Path, text: Path, tmp_path: Path
) -> None:
    number_tokenizer(90).save(str(source / "tokenizer.json"))
    text.write_text("1 2 61 " * 30)
    with pytest.raises(ValueError, match=r"calibrate: got token 61 of .*, expected less .* 61"):
        quantize_checkpoint(source, tmp_path / "target", kv_cache="fp8", calibrate=text)


@pytest.mark.parametrize(("name", "part"), [("k_proj", "keys"), ("v_proj", "values")])
def test_keys_and_values_that_overflow_are_named(
    name: str, part: str, source: Path, text: Path, tmp_path: Path
) -> None:
    file = source / "model.safetensors"
    tensors = load_file(file)
    tensors[f"model.layers.1.self_attn.{name}.weight"].fill_(3e38)
    save_file(tensors, file)
    with pytest.raises(ValueError, match=f"calibrate: {part} of layer 1 are NaN or infinite"):
        quantize_checkpoint(source, tmp_path / "target", kv_cache="fp8", calibrate=text)
    assert not (tmp_path / "target").exists()


def test_values_of_nothing_but_zeros_get_a_scale(source: Path, text: Path, tmp_path: Path) -> None:
    file = source / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.0.self_attn.v_proj.weight"].zero_()
    save_file(tensors, file)
    quantize_checkpoint(source, tmp_path / "target", kv_cache="int8", calibrate=text)
    found = load_model(tmp_path / "target").kv_scales
    assert found is not None
    assert found.v is not None
    assert found.v[0] == 1.0


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({}, "scheme: got None, expected one, or a kv_cache"),
        ({"kv_cache": "fp8"}, "calibrate: got None, expected a text file with kv_cache"),
        ({"scheme": "fp8", "calibrate": "text"}, "calibrate: got a text for 'fp8', expected None"),
        ({"kv_cache": "fp4", "calibrate": "text"}, "kv_cache: got 'fp4', expected 'int8' or 'fp8'"),
    ],
)
def test_arguments_that_do_not_go_together_are_named(
    options: dict[str, Any], match: str, source: Path, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=match):
        quantize_checkpoint(source, tmp_path / "target", **options)


def test_a_dense_format_quantises_no_module(source: Path, text: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    quantize_checkpoint(source, target, kv_cache="fp8", calibrate=text)
    config = json.loads((target / "config.json").read_text())
    config["quantization_config"]["config_groups"] = {"group_0": {"targets": ["Linear"]}}
    (target / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedCheckpointError, match="format: got 'dense': config_groups"):
        load_model(target)
