"""Which tensors a loaded model holds: their values, dtypes, devices, and whose memory they are."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import MODELS, TOKENS, config_of, random_model, save, save_plain, tensors_of
from hypothesis import given
from hypothesis import strategies as st
from quantized_files import FORMATS, INT8, write_quantized
from safetensors.torch import load_file

from ostinato import ops
from ostinato.checkpoint import CheckpointError, load_config, load_model
from ostinato.checkpoint.scales import merge_asymmetric
from ostinato.models import DenseLinear, W8A8Linear, sequence_logits

ATTENTION, MLP = "model.layers.1.self_attn.", "model.layers.1.mlp."
FUSED = {
    "qkv": [ATTENTION + "q_proj", ATTENTION + "k_proj", ATTENTION + "v_proj"],
    "o": [ATTENTION + "o_proj"],
    "gate_up": [MLP + "gate_proj", MLP + "up_proj"],
    "down": [MLP + "down_proj"],
}


def in_rows(weight: torch.Tensor | ops.PackedWeight) -> torch.Tensor:
    """Return the weight [N, K] of a layer, which is packed on GPUs with kernels for it."""
    return weight.unpack() if isinstance(weight, ops.PackedWeight) else weight


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_plain_tensors_are_those_of_the_file(
    dtype: torch.dtype, device: torch.device, tmp_path: Path
) -> None:
    hf = random_model(MODELS["llama-biases"])
    model = load_model(save_plain(tmp_path, hf, dtype), device=device)
    stored = {name: tensor.to(device) for name, tensor in tensors_of(hf, dtype).items()}
    assert model.config.dtype is dtype
    assert model.device == torch.empty(0, device=device).device
    assert torch.equal(model.embedding, stored["model.embed_tokens.weight"])
    assert torch.equal(model.norm.weight, stored["model.norm.weight"])
    assert isinstance(model.lm_head, DenseLinear)
    assert torch.equal(in_rows(model.lm_head.weight), stored["lm_head.weight"])
    assert model.lm_head.out_dtype is torch.float32
    layer = model.layers[1]
    assert torch.equal(layer.input_norm.weight, stored["model.layers.1.input_layernorm.weight"])
    assert torch.equal(
        layer.post_attention_norm.weight, stored["model.layers.1.post_attention_layernorm.weight"]
    )
    for field, names in FUSED.items():
        linear = getattr(layer, field)
        assert isinstance(linear, DenseLinear)
        weights = torch.cat([stored[f"{n}.weight"] for n in names])
        assert torch.equal(in_rows(linear.weight), weights)
        assert torch.equal(linear.bias, torch.cat([stored[f"{n}.bias"] for n in names]))


def test_query_and_key_norms_are_loaded(tmp_path: Path) -> None:
    hf = random_model(MODELS["qwen3"])
    layer = load_model(save_plain(tmp_path, hf)).layers[1]
    assert torch.equal(layer.q_norm.weight, tensors_of(hf)[ATTENTION + "q_norm.weight"])
    assert torch.equal(layer.k_norm.weight, tensors_of(hf)[ATTENTION + "k_norm.weight"])


@pytest.mark.parametrize("name", FORMATS)
def test_quantized_tensors_are_those_of_the_file(name: str, tmp_path: Path) -> None:
    form = FORMATS[name]
    file = write_quantized(tmp_path, random_model(MODELS["llama-biases"]), form)
    layer = load_model(tmp_path).layers[1]
    for field, names in FUSED.items():
        linear = getattr(layer, field)
        if names[0] not in file.modules:
            assert isinstance(linear, DenseLinear)
            continue
        parts = [file.modules[name] for name in names]
        assert isinstance(linear, W8A8Linear)
        assert linear.weight.dtype is form.dtype
        assert linear.weight.is_contiguous()
        expected = torch.cat([part.weight.float() for part in parts])
        assert torch.equal(linear.weight.float(), expected)
        rows = [part.weight_scale.expand(len(part.weight)) for part in parts]
        assert linear.weight_scale.dtype is torch.float32
        assert torch.equal(linear.weight_scale, torch.cat(rows))
        assert linear.bias is not None
        assert linear.out_dtype is torch.float32
        scale, zero_point = file.fused(names)
        if scale is None:
            assert linear.input_scale is None
        else:
            assert linear.input_scale is not None
            assert linear.input_scale.shape == ()
            torch.testing.assert_close(linear.input_scale, scale, rtol=1e-6, atol=0.0)
        if zero_point is None:
            assert linear.input_zero_point is None
            assert linear.weight_sum is None
        else:
            assert linear.input_zero_point is not None
            assert linear.input_zero_point.dtype is torch.int32
            assert linear.input_zero_point == zero_point
            assert linear.weight_sum is not None
            assert torch.equal(linear.weight_sum, expected.sum(1).int())


def test_a_quantized_output_projection_is_loaded(tmp_path: Path) -> None:
    form = FORMATS["ct-int8-with-lm-head"]
    file = write_quantized(tmp_path, random_model(MODELS["llama"]), form)
    head = load_model(tmp_path).lm_head
    assert isinstance(head, W8A8Linear)
    assert torch.equal(head.weight, file.modules["lm_head"].weight)


@pytest.mark.parametrize("form", [None, "ct-int8-with-lm-head"])
def test_logits_of_16_bit_models_are_fp32(form: str | None, tmp_path: Path) -> None:
    hf = random_model(MODELS["llama-biases"])
    if form is None:
        save_plain(tmp_path, hf)
    else:
        write_quantized(tmp_path, hf, FORMATS[form])
    model = load_model(tmp_path, dtype=torch.bfloat16)
    assert (model.lm_head.out_dtype, model.layers[0].o.out_dtype) == (torch.float32, torch.bfloat16)
    logits = sequence_logits(model, TOKENS)
    assert logits.dtype is torch.float32
    assert not torch.equal(logits, logits.bfloat16().float())


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_the_output_projection_is_quantised_when_asked(dtype: torch.dtype, tmp_path: Path) -> None:
    folder = save_plain(tmp_path, random_model(MODELS["llama-biases"]))
    plain, model = load_model(folder), load_model(folder, lm_head_dtype=dtype)
    assert isinstance(model.lm_head, W8A8Linear)
    assert (model.lm_head.weight.dtype, model.lm_head.out_dtype) == (dtype, torch.float32)
    assert isinstance(model.layers[0].qkv, DenseLinear)
    want = sequence_logits(plain, TOKENS)
    got = sequence_logits(model, TOKENS)
    torch.testing.assert_close(got, want, rtol=0.0, atol=0.06 * float(want.abs().max()))
    with pytest.raises(
        TypeError, match=r"lm_head_dtype: got torch\.bfloat16, expected torch\.int8"
    ):
        load_model(folder, lm_head_dtype=torch.bfloat16)


def test_batch_invariance_reaches_attention_and_every_layer(tmp_path: Path) -> None:
    write_quantized(tmp_path, random_model(MODELS["llama-biases"]), next(iter(FORMATS.values())))
    for wanted in (True, False):
        model = load_model(tmp_path, batch_invariant=wanted)
        linears = [part for layer in model.layers for part in (layer.qkv, layer.o, layer.down)]
        assert model.batch_invariant is wanted
        assert all(part.batch_invariant is wanted for part in linears)


def test_a_dtype_can_be_chosen(tmp_path: Path) -> None:
    file = write_quantized(
        tmp_path, random_model(MODELS["llama-biases"]), FORMATS["ct-int8-dynamic"]
    )
    model = load_model(tmp_path, dtype=torch.bfloat16)
    assert model.config.dtype is model.embedding.dtype is model.norm.weight.dtype is torch.bfloat16
    qkv = model.layers[1].qkv
    assert isinstance(qkv, W8A8Linear)
    assert qkv.out_dtype is torch.bfloat16
    assert qkv.bias is not None
    assert qkv.bias.dtype is torch.bfloat16
    assert qkv.weight_scale.dtype is torch.float32
    assert torch.equal(qkv.weight[:32], file.modules[FUSED["qkv"][0]].weight)


def test_another_dtype_is_refused(tmp_path: Path) -> None:
    save_plain(tmp_path, random_model(MODELS["llama"]))
    with pytest.raises(TypeError, match=r"dtype: got torch\.int8, expected one of torch\.bf"):
        load_model(tmp_path, dtype=torch.int8)


@pytest.mark.parametrize(("dtype", "number"), [(torch.float16, -1e5), (torch.bfloat16, 3.4e38)])
def test_numbers_beyond_a_dtype_are_refused(
    dtype: torch.dtype, number: float, tmp_path: Path
) -> None:
    hf = random_model(MODELS["llama"])
    tensors = tensors_of(hf)
    tensors["model.norm.weight"][3] = number
    save(tmp_path, config_of(hf), tensors)
    load_model(tmp_path)
    with pytest.raises(
        CheckpointError, match=rf"model\.norm\.weight: holds numbers beyond the range of {dtype}"
    ):
        load_model(tmp_path, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_without_a_dtype_that_of_the_stored_weights_counts(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    folder = save_plain(tmp_path / "model", random_model(MODELS["llama"]), dtype)
    file = folder / "config.json"
    config = json.loads(file.read_text())
    config.pop("dtype", None)
    config.pop("torch_dtype", None)
    file.write_text(json.dumps(config))
    assert load_model(folder).config.dtype is dtype
    (folder / "model.safetensors").unlink()
    assert load_config(folder).dtype is torch.float32


def test_max_context_is_passed_on(tmp_path: Path) -> None:
    save_plain(tmp_path, random_model(MODELS["llama"]))
    assert load_model(tmp_path, max_context=48).max_context == 48
    with pytest.raises(ValueError, match="max_context: got 65, expected 1 to"):
        load_model(tmp_path, max_context=65)


def test_the_model_outlives_its_files(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    write_quantized(folder, random_model(MODELS["llama-biases"]), FORMATS["ct-int8-asymmetric"])
    model = load_model(folder)
    before = sequence_logits(model, TOKENS)
    for file in folder.iterdir():
        file.write_bytes(b"\0" * file.stat().st_size)
    shutil.rmtree(folder)
    assert torch.equal(sequence_logits(model, TOKENS), before)


@pytest.mark.parametrize("stored_twice", [False, True])
def test_tied_embeddings_are_one_tensor(stored_twice: bool, tmp_path: Path) -> None:
    hf = random_model(MODELS["llama-tied"])
    tensors = tensors_of(hf)
    if stored_twice:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    model = load_model(save(tmp_path, config_of(hf), tensors))
    assert model.lm_head.weight is model.embedding


def test_a_copy_that_differs_from_a_tied_embedding_is_refused(tmp_path: Path) -> None:
    hf = random_model(MODELS["llama-tied"])
    tensors = tensors_of(hf)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1
    save(tmp_path, config_of(hf), tensors)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight: differs from model\.embed_tok"):
        load_model(tmp_path)


def test_shards_are_read_as_one_checkpoint(tmp_path: Path) -> None:
    hf = random_model(MODELS["llama"])
    tensors = tensors_of(hf)
    names = list(tensors)
    shards = [{name: tensors[name] for name in names[start::3]} for start in range(3)]
    whole = load_model(save(tmp_path / "whole", config_of(hf), tensors))
    parts = load_model(save(tmp_path / "parts", config_of(hf), *shards))
    for left, right in zip(whole.tensors(), parts.tensors(), strict=True):
        assert torch.equal(left, right)


def test_buffers_of_old_exporters_are_passed_over(tmp_path: Path) -> None:
    hf = random_model(MODELS["llama"])
    tensors = tensors_of(hf)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    load_model(save(tmp_path, config_of(hf), tensors))


def test_zero_points_of_symmetric_weights_must_be_zero(tmp_path: Path) -> None:
    form = FORMATS["ct-int8-static"]
    file = write_quantized(tmp_path, random_model(MODELS["llama"]), form)
    tensors = load_file(tmp_path / "model.safetensors")
    name = FUSED["o"][0]
    tensors[f"{name}.weight_zero_point"] = torch.zeros(32, 1, dtype=INT8)
    tensors[f"{name}.input_zero_point"] = torch.zeros(1, dtype=INT8)
    config = {**config_of(file.plain), "quantization_config": form.config}
    linear = load_model(save(tmp_path, config, tensors)).layers[1].o
    assert isinstance(linear, W8A8Linear)
    assert linear.input_zero_point is None
    tensors[f"{name}.weight_zero_point"][5] = 1
    save(tmp_path, config, tensors)
    with pytest.raises(CheckpointError, match=r"o_proj\.weight_zero_point: holds zero points"):
        load_model(tmp_path)


def test_end_tokens_are_those_of_the_generation_config(tmp_path: Path) -> None:
    save_plain(tmp_path, random_model(MODELS["llama"]))
    assert load_config(tmp_path).eos_token_ids == (2,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 7]}')
    assert load_config(tmp_path).eos_token_ids == (2, 7)
    (tmp_path / "generation_config.json").write_text("{}")
    assert load_config(tmp_path).eos_token_ids == (2,)


zero_points = st.integers(-128, 127)
scales = st.floats(2.0**-20, 2.0**20, width=32)


@given(st.lists(st.tuples(scales, zero_points), min_size=1, max_size=4))
def test_a_merged_range_covers_every_part(parts: list[tuple[float, int]]) -> None:
    scale, zero_point = merge_asymmetric(
        torch.tensor([s for s, _ in parts]), torch.tensor([z for _, z in parts], dtype=torch.int32)
    )
    assert -128 <= zero_point <= 127
    low = float(scale * (-128 - zero_point))
    high = float(scale * (127 - zero_point))
    # Rounding the zero point may cost each end half a step.
    slack = 0.51 * float(scale)
    for s, z in parts:
        assert low - slack <= s * (-128 - z)
        assert s * (127 - z) <= high + slack


@given(scales, zero_points, st.integers(1, 3))
def test_equal_ranges_merge_into_themselves(scale: float, zero_point: int, parts: int) -> None:
    merged: tuple[Any, Any] = merge_asymmetric(
        torch.tensor([scale] * parts), torch.tensor([zero_point] * parts, dtype=torch.int32)
    )
    assert (float(merged[0]), int(merged[1])) == (scale, zero_point)
