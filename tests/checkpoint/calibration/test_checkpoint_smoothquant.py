"""ModelOpt's SmoothQuant: factors of inputs are folded into what is in front, or refused."""

from __future__ import annotations

import copy
import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import MODELS, SHAPE, TOKENS, hf_logits, random_model
from quantized_files import (
    FUSED,
    MARGINS,
    SPELLINGS,
    QuantizedFile,
    sturdy_tokens,
    write_quantized,
)
from rank_models import logits_of_ranks
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import LlamaConfig, PreTrainedModel

from ostinato.checkpoint import CheckpointError, UnsupportedCheckpointError, load_model
from ostinato.checkpoint.load import CheckpointLoader
from ostinato.checkpoint.quantization import load_quantization
from ostinato.checkpoint.reader import CheckpointReader
from ostinato.checkpoint.storage.base import Target
from ostinato.models import UnsupportedModelError, family_of, read_config, sequence_logits
from ostinato.models.folding import build

FORM = SPELLINGS["modelopt-int8"]
LAYER = "model.layers.0."
QKV = tuple(f"self_attn.{name}_proj" for name in "qkv")
GATE_UP = ("mlp.gate_proj", "mlp.up_proj")
# Attention and MLP of these read the same norm.
PARALLEL = ("cohere", "stablelm-parallel")
UNGATED = ("nemotron", "arcee")

# By module, within a layer.
Factors = dict[str, torch.Tensor]


def factors_of(kind: str, name: str = "llama") -> Factors:
    """Return factors for the layers of a model of `MODELS` that can be folded."""
    config: Any = MODELS[name]
    generator = torch.Generator().manual_seed(4)
    kv_heads = config.num_key_value_heads
    group = config.num_attention_heads // kv_heads
    dim = getattr(config, "head_dim", None) or SHAPE["hidden_size"] // config.num_attention_heads
    gate_up = GATE_UP[1:] if name in UNGATED else GATE_UP

    def draw(count: int) -> torch.Tensor:
        return torch.rand(count, generator=generator) * 2 + 0.25

    hidden, intermediate = SHAPE["hidden_size"], SHAPE["intermediate_size"]
    of_qkv, of_gate_up = draw(hidden), draw(hidden)
    if name in PARALLEL:
        of_gate_up = of_qkv
    of_heads = draw(kv_heads * dim).view(-1, 1, dim).expand(-1, group, -1)
    found: Factors = {}
    if kind in ("norms", "all"):
        found |= dict.fromkeys(QKV, of_qkv) | dict.fromkeys(gate_up, of_gate_up)
    if kind in ("up", "all"):
        found["mlp.down_proj"] = draw(intermediate)
    if kind in ("v", "all") and name not in PARALLEL:
        found["self_attn.o_proj"] = of_heads.reshape(-1).contiguous()
    return found


def smoothed(model: PreTrainedModel, factors: Factors) -> PreTrainedModel:
    """Return a model that multiplies the inputs of modules, whose weights are divided likewise."""

    class Smoothed(nn.Linear):
        factors: torch.Tensor

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x * self.factors)

    found: Any = copy.deepcopy(model)
    for layer in found.model.layers:
        for name, values in factors.items():
            linear = layer.get_submodule(name)
            linear.__class__, linear.factors = Smoothed, values
            linear.weight.data /= values
    return found


def write(
    folder: Path,
    model: PreTrainedModel,
    factors: Factors,
    form: Any = FORM,
    margins: dict[str, float] = MARGINS,
) -> QuantizedFile:
    """Write a checkpoint with factors, as ModelOpt exports it."""
    written = write_quantized(folder, smoothed(model, factors), form, margins)
    tensors = load_file(folder / "model.safetensors")
    for name in written.modules:
        short = name.removeprefix("model.layers.").partition(".")[2]
        if short in factors:
            tensors[f"{name}.pre_quant_scale"] = factors[short].clone()
    save_file(tensors, folder / "model.safetensors")
    return written


def observed_with_factors(written: QuantizedFile, factors: Factors) -> PreTrainedModel:
    """Return the twin, whose quantised modules see inputs times factors."""
    twin: Any = written.twin()
    for layer in twin.model.layers:
        for name, values in factors.items():
            module = layer.get_submodule(name)
            module.register_forward_pre_hook(lambda _, args, values=values: (args[0] * values,))
    return twin


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *product(("llama", "llama-biases"), ("norms", "up", "v", "all")),
        *product(("gemma2", "hunyuan_v1_dense", *UNGATED, *PARALLEL), ("all",)),
    ],
)
def test_factors_are_folded(name: str, kind: str, device: torch.device, tmp_path: Path) -> None:
    model, factors = random_model(MODELS[name]), factors_of(kind, name)
    # The runtime joins what reads the same norm, and the twin does not: scales must be equal.
    margins = {**MARGINS, **dict.fromkeys((*FUSED[0], *FUSED[1]), 1.0)}
    written = write(tmp_path, model, factors, margins=margins if name in PARALLEL else MARGINS)
    twin = observed_with_factors(written, factors)
    tokens = sturdy_tokens(twin)
    ours = sequence_logits(load_model(tmp_path, device=device), tokens).cpu()
    theirs = hf_logits(twin, tokens)
    assert (theirs - hf_logits(model, tokens)).abs().max() > 0.01, "nothing was quantised"
    assert (ours - theirs).abs().max() <= 1e-4
    without = tmp_path / "without"
    without.mkdir()
    (without / "config.json").write_text((tmp_path / "config.json").read_text())
    tensors = load_file(tmp_path / "model.safetensors")
    kept = {key: t for key, t in tensors.items() if not key.endswith("pre_quant_scale")}
    save_file(kept, without / "model.safetensors")
    assert (sequence_logits(load_model(without), tokens) - theirs).abs().max() > 0.01


def test_factors_of_1_change_nothing(tmp_path: Path) -> None:
    model = random_model(MODELS["llama"])
    write(tmp_path / "with", model, {"mlp.up_proj": torch.ones(SHAPE["hidden_size"])})
    write(tmp_path / "without", model, {})
    tokens = [3, 9, 27]
    with_ones, plain = (
        sequence_logits(load_model(tmp_path / name), tokens) for name in ("with", "without")
    )
    assert torch.equal(with_ones, plain)


def halves(size: int) -> torch.Tensor:
    return torch.full((size,), 0.5)


HIDDEN, INTERMEDIATE = SHAPE["hidden_size"], SHAPE["intermediate_size"]


@pytest.mark.parametrize(
    ("name", "factors", "error", "words"),
    [
        (
            "llama",
            {"mlp.up_proj": halves(HIDDEN)},
            UnsupportedCheckpointError,
            r"up_proj\.pre_quant_scale: holds factors other than those of .*gate_proj",
        ),
        (
            "llama",
            {QKV[0]: halves(HIDDEN), QKV[1]: halves(HIDDEN), QKV[2]: halves(HIDDEN) / 2},
            UnsupportedCheckpointError,
            r"q_proj\.pre_quant_scale: holds factors other than those of .*v_proj",
        ),
        (
            "llama",
            {"self_attn.o_proj": torch.linspace(0.5, 2.0, HIDDEN)},
            UnsupportedModelError,
            r"o_proj\.pre_quant_scale: .*query heads of one KV head have different ones",
        ),
        (
            "olmo2",
            dict.fromkeys(QKV, halves(HIDDEN)),
            UnsupportedModelError,
            r"q_proj\.pre_quant_scale: .*nothing in front of the layer can take them up",
        ),
        (
            "starcoder2",
            {"mlp.c_proj": halves(INTERMEDIATE)},
            UnsupportedModelError,
            r"c_proj\.pre_quant_scale: .*gelu_tanh does not let them through",
        ),
        (
            "cohere",
            {"self_attn.o_proj": halves(HIDDEN)},
            UnsupportedModelError,
            r"o_proj\.pre_quant_scale: .*nothing in front of the layer can take them up",
        ),
    ],
    ids=["gate beside up", "v beside q", "heads", "no norm", "GELU", "one norm"],
)
def test_factors_that_cannot_be_folded_are_refused(
    name: str, factors: Factors, error: type[Exception], words: str, tmp_path: Path
) -> None:
    write(tmp_path, random_model(MODELS[name]), factors)
    with pytest.raises(error, match=words):
        load_model(tmp_path)


def test_a_layer_in_16_bits_takes_up_no_factors(tmp_path: Path) -> None:
    form = copy.deepcopy(FORM)
    form.config["ignore"] = ["lm_head", "up_proj"]
    skipped = tuple(f"model.layers.{layer}.mlp.up_proj" for layer in range(2))
    object.__setattr__(form, "skipped", ("lm_head", *skipped))
    write(tmp_path, random_model(MODELS["llama"]), {"mlp.down_proj": halves(INTERMEDIATE)}, form)
    with pytest.raises(UnsupportedModelError, match=r"down_proj\.pre_quant_scale: .*no scale for"):
        load_model(tmp_path)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_factors_that_are_no_factors_are_refused(value: float, tmp_path: Path) -> None:
    factors = halves(INTERMEDIATE)
    write(tmp_path, random_model(MODELS["llama"]), {"mlp.down_proj": factors})
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors[f"{LAYER}mlp.down_proj.pre_quant_scale"][3] = value
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=r"pre_quant_scale: got .* at index 3"):
        load_model(tmp_path)


def test_a_norm_must_hold_its_products(tmp_path: Path) -> None:
    factors = torch.full((HIDDEN,), 1e5)
    write(tmp_path, random_model(MODELS["llama"]), dict.fromkeys(GATE_UP, factors))
    with pytest.raises(UnsupportedModelError, match=r"a norm's weight times them is beyond"):
        load_model(tmp_path, dtype=torch.float16)


def test_scales_of_a_kv_cache_are_not_changed_in_silence(tmp_path: Path) -> None:
    write(tmp_path, random_model(MODELS["llama"]), factors_of("v"))
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["kv_cache_quant_algo"] = "FP8"
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedCheckpointError, match="beside scales of an 8-bit KV cache"):
        load_model(tmp_path)


@pytest.mark.parametrize("name", ["llama-biases", "gemma2", "arcee", "cohere"])
def test_ranks_fold_what_one_device_folds(name: str, tmp_path: Path) -> None:
    write(tmp_path, random_model(MODELS[name]), factors_of("all", name))
    expected = sequence_logits(load_model(tmp_path), TOKENS)
    assert (logits_of_ranks(tmp_path, 2, TOKENS) - expected).abs().max() <= 1e-4


def test_ranks_fold_their_own_factors(tmp_path: Path) -> None:
    config = LlamaConfig(**{**SHAPE, "vocab_size": 60}, attention_bias=True, mlp_bias=True)
    write(tmp_path, random_model(config), factors_of("all"))
    shape = read_config(json.loads((tmp_path / "config.json").read_text()))
    whole = family_of(shape).layout(shape)
    target = Target(torch.device("cpu"), torch.float32, batch_invariant=True)
    with CheckpointReader(tmp_path) as reader:
        scheme_of = load_quantization(tmp_path).scheme_of
        loader = CheckpointLoader(reader, scheme_of, target, None)
        layers = [
            build(layout.layers[0], loader)
            for layout in (whole, whole.shard(0, 2), whole.shard(1, 2))
        ]
    x = torch.randn(3, HIDDEN)
    first, second, third = (layer["gate_up"](x).chunk(2, dim=1) for layer in layers)
    for part in range(2):
        assert torch.equal(torch.cat([second[part], third[part]], 1), first[part])
    sizes = [32, 16, 16]
    whole_v = layers[0]["qkv"](x).split(sizes, dim=1)[2]
    halves_of_v = [layer["qkv"](x).split([n // 2 for n in sizes], dim=1)[2] for layer in layers[1:]]
    assert torch.equal(torch.cat(halves_of_v, 1), whole_v)
    assert torch.equal(layers[1]["input_norm"].weight, layers[0]["input_norm"].weight)
