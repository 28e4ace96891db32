"""Modules that the model joins, stored in different ways: a product for each run of equal ones."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path

import pytest
import torch
from hf_models import MODELS, hf_logits, random_model, save, tensors_of
from quantized_files import (
    FORMATS,
    FUSED,
    SPELLINGS,
    FakeQuantLinear,
    QuantizedFile,
    sturdy_tokens,
    write_quantized,
)
from safetensors.torch import load_file
from transformers import PreTrainedModel

from ostinato.checkpoint import load_config, load_model
from ostinato.engine import Engine, SamplingParams
from ostinato.models import (
    AsymmetricLinear,
    DenseLinear,
    JoinedLinear,
    W8A8Linear,
    sequence_logits,
)
from tiny import byte_tokenizer

# The format of each module that is joined; None is not quantised.
Forms = Mapping[str, str | None]
STORED = {**FORMATS, **SPELLINGS}
DYNAMIC, STATIC, FP8 = "ct-int8-dynamic", "ct-int8-static", "ct-fp8-dynamic"
MIXTURES: dict[str, Forms] = {
    "v in 16 bits": {"v_proj": None},
    "k in 16 bits": {"k_proj": None, "up_proj": None},
    "v in FP8": {"v_proj": FP8, "gate_proj": FP8},
    "q static": {"q_proj": STATIC, "up_proj": STATIC},
    "v dynamic": {"q_proj": STATIC, "k_proj": STATIC, "gate_proj": STATIC},
    "zero points": {"q_proj": "ct-int8-asymmetric", "k_proj": "ct-int8-asymmetric-dynamic"},
}


def write_mixture(folder: Path, plain: PreTrainedModel, forms: Forms) -> PreTrainedModel:
    """Write a checkpoint, all other modules of it in `DYNAMIC`; return its fake-quantised twin."""
    names = {DYNAMIC, *(form for form in forms.values() if form is not None)}
    files = {name: write_quantized(folder / name, plain, STORED[name]) for name in sorted(names)}
    stored = {name: load_file(file.folder / "model.safetensors") for name, file in files.items()}
    tensors, config = tensors_of(plain), files[DYNAMIC].plain.config.to_dict()
    config["architectures"] = [type(plain).__name__]
    groups, twin = {}, copy.deepcopy(plain)
    modules = files[DYNAMIC].modules
    for name in modules:
        child = name.rpartition(".")[2]
        form = forms.get(child, DYNAMIC)
        if form is not None:
            tensors |= {k: v for k, v in stored[form].items() if k.startswith(f"{name}.")}
            replace_by_twin(twin, files[form], name, run_of(name, forms))
    for name in sorted(names):
        targets = [f"re:.*{child}$" for child, form in forms.items() if form == name]
        group = STORED[name].config["config_groups"]["group_0"]
        kind = STORED[name].config["format"]
        groups[name] = {**group, "format": kind, "targets": targets or ["Linear"]}
    ignore = ["lm_head", *(f"re:.*{child}$" for child, form in forms.items() if form is None)]
    config["quantization_config"] = {
        **STORED[DYNAMIC].config,
        "format": "mixed-precision",
        "config_groups": groups,
        "ignore": ignore,
    }
    save(folder, config, tensors)
    return twin


def run_of(name: str, forms: Forms) -> list[str]:
    """Return the adjacent modules of the same form, this one among them."""
    parent, _, child = name.rpartition(".")
    group = next((g for g in FUSED if child in g), (child,))
    runs = [list(run) for _, run in groupby(group, lambda item: forms.get(item, DYNAMIC))]
    return [f"{parent}.{item}" for item in next(run for run in runs if child in run)]


def replace_by_twin(model: PreTrainedModel, file: QuantizedFile, name: str, run: list[str]) -> None:
    parent, _, child = name.rpartition(".")
    scale, zero = file.fused(run)
    bias = model.get_submodule(name).bias
    layer = FakeQuantLinear(file.modules[name], file.format, scale, zero, bias)
    setattr(model.get_submodule(parent), child, layer)


@pytest.mark.parametrize("mixture", MIXTURES)
@pytest.mark.parametrize("name", ["llama-biases", "qwen3", "olmo2"])
def test_logits_equal_those_of_a_twin(
    name: str, mixture: str, device: torch.device, tmp_path: Path
) -> None:
    model = random_model(MODELS[name])
    twin = write_mixture(tmp_path, model, MIXTURES[mixture])
    tokens = sturdy_tokens(twin)
    ours = sequence_logits(load_model(tmp_path, device=device), tokens).cpu()
    theirs = hf_logits(twin, tokens)
    quantization_error = float((theirs - hf_logits(model, tokens)).abs().max())
    assert quantization_error > 0.01, "nothing was quantised"
    # Hopper's tensor cores add FP8 products with about 13 bits of fraction.
    imprecise = device.type == "cuda" and FP8 in MIXTURES[mixture].values()
    tolerance = quantization_error if imprecise else 1e-4
    assert (ours - theirs).abs().max() <= tolerance


@pytest.mark.parametrize(
    ("mixture", "layers"),
    [
        ("v in 16 bits", [W8A8Linear, DenseLinear]),
        ("k in 16 bits", [W8A8Linear, DenseLinear, W8A8Linear]),
        ("v dynamic", [W8A8Linear, W8A8Linear]),
        ("zero points", [W8A8Linear, AsymmetricLinear, W8A8Linear]),
    ],
)
def test_runs_of_equal_modules_are_one_product(
    mixture: str, layers: list[type], tmp_path: Path
) -> None:
    write_mixture(tmp_path, random_model(MODELS["llama"]), MIXTURES[mixture])
    qkv = load_model(tmp_path).layers[0].qkv
    assert isinstance(qkv, JoinedLinear)
    assert [type(part) for part in qkv.parts] == layers
    config = load_config(tmp_path)
    assert qkv.shape == (config.q_size + 2 * config.kv_size, config.hidden_size)
    assert len(list(qkv.tensors())) > len(layers)


@pytest.mark.parametrize("mixture", ["k in 16 bits", "v in FP8", "zero points"])
def test_captured_steps_are_verified_and_alone_alike(
    mixture: str, device: torch.device, tmp_path: Path
) -> None:
    write_mixture(tmp_path, random_model(MODELS["qwen3"]), MIXTURES[mixture])
    dtype = torch.bfloat16 if device.type == "cuda" else None
    model = load_model(tmp_path, device=device, dtype=dtype)
    engine = Engine(model, byte_tokenizer(), max_batch=4, page_size=16, prefill_chunk=32)
    report = engine.capture([1, 4], progress=False)
    assert {graph.verdict for graph in report.graphs} == {"bit-equal"}
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    prompts = [[3, 9, 27], [5], [1, 2, 4, 8, 16]]
    together = [completion.token_ids for completion in engine.generate(prompts, params)]
    for prompt, tokens in zip(prompts, together, strict=True):
        (alone,) = engine.generate([prompt], params)
        assert alone.token_ids == tokens


def test_results_of_parts_cannot_be_scaled_together(tmp_path: Path) -> None:
    write_mixture(tmp_path, random_model(MODELS["llama"]), MIXTURES["v in 16 bits"])
    layer = load_model(tmp_path).layers[0]
    with pytest.raises(ValueError, match="parts: got several, expected one"):
        layer.qkv.scaled(layer.input_norm, 0.5)


def test_a_gate_comes_before_every_part(tmp_path: Path) -> None:
    write_mixture(tmp_path, random_model(MODELS["llama"]), MIXTURES["v in 16 bits"])
    qkv = load_model(tmp_path).layers[0].qkv
    gate_up = torch.randn(3, 2 * qkv.shape[1])
    gate, up = gate_up.chunk(2, dim=1)
    expected = qkv(torch.nn.functional.silu(gate) * up)
    torch.testing.assert_close(
        qkv.after_activation(gate_up, "silu_mul"), expected, rtol=0.0, atol=1e-3
    )
