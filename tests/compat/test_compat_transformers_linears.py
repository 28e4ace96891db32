"""Linear modules of quantised checkpoints in transformers' models, replaced by 8-bit products."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import block_files
import pytest
import torch
import transformers
from hf_models import MODELS, random_model, save
from quantized_files import FORMATS, SPELLINGS, sturdy_tokens, write_quantized
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.integrations.finegrained_fp8 import FP8Linear
from transformers.quantizers import quantizer_finegrained_fp8

from effort import effort
from ostinato.checkpoint import CheckpointError, UnsupportedCheckpointError
from ostinato.compat.transformers import QuantizedLinear, replace_linears
from ostinato.compat.transformers.linears import quantize_linears

transformers.logging.set_verbosity_error()

FORMS = {**FORMATS, **SPELLINGS}
# transformers loads it on a GPU alone.
ON_CPU = [name for name in FORMS if name != "fbgemm-fp8"]
# One of each producer, dynamic and static, with zero points, and with an 8-bit lm_head.
SAMPLE = [
    *("ct-int8-dynamic", "ct-int8-asymmetric", "ct-int8-asymmetric-dynamic", "ct-fp8-static"),
    *("ct-int8-with-lm-head", "hf-fp8-transformers", "modelopt-fp8", "modelopt-int8"),
]
IDS = torch.tensor([[3, 41, 17, 8, 60]])
UP = "model.layers.1.mlp.up_proj"


@pytest.fixture(autouse=True)
def _fp8_without_accelerate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let transformers load its FP8, which it dequantises on a CPU, without that package."""
    monkeypatch.setattr(quantizer_finegrained_fp8, "is_accelerate_available", lambda: True)


def load(folder: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **options)
    # transformers dequantises its FP8 to 16 bits, whatever it is asked for.
    return model.to(dtype).eval().requires_grad_(False)


def of_format(folder: Path, name: str = "ct-int8-dynamic") -> Any:
    write_quantized(folder, random_model(MODELS["llama"]), FORMS[name], margins={})
    return load(folder)


@pytest.mark.parametrize("name", effort(SAMPLE, ON_CPU))
def test_logits_are_those_of_a_fake_quantized_twin(name: str, tmp_path: Path) -> None:
    plain = random_model(MODELS["llama-biases"])
    written = write_quantized(tmp_path, plain, FORMS[name], margins={})
    twin = written.twin()
    model = load(tmp_path)
    outcome = quantize_linears(model)
    assert outcome.replaced == list(written.modules)
    assert outcome.left == {}
    ids = torch.tensor([sturdy_tokens(twin)])
    torch.testing.assert_close(model(ids).logits, twin(ids).logits, rtol=0.0, atol=1e-4)
    assert (twin(ids).logits - plain(ids).logits).abs().max() > 0.01, "nothing was quantised"
    assert replace_linears(model) == []


@pytest.mark.parametrize("name", effort(["hf", "compressed-tensors"], list(block_files.FORMATS)))
def test_blocks_of_fp8_are_those_of_a_twin(name: str, tmp_path: Path) -> None:
    form = block_files.FORMATS[name]
    written = block_files.write_blocks(tmp_path, random_model(block_files.WHOLE_BLOCKS), form)
    twin = written.twin()
    model = load(tmp_path)
    assert replace_linears(model) == list(written.modules)
    ids = torch.tensor([sturdy_tokens(twin, 1)])
    torch.testing.assert_close(model(ids).logits, twin(ids).logits, rtol=0.0, atol=1e-4)


def test_modules_of_transformers_fp8_are_replaced(tmp_path: Path) -> None:
    """What transformers has on a GPU: modules of its own class that hold the file's tensors."""
    plain = random_model(block_files.WHOLE_BLOCKS)
    written = block_files.write_blocks(tmp_path, plain, block_files.FORMATS["hf"])
    tensors = load_file(tmp_path / "model.safetensors")
    model = copy.deepcopy(plain)
    for name in written.modules:
        before = model.get_submodule(name)
        after = FP8Linear(
            before.in_features, before.out_features, (128, 128), has_bias=before.bias is not None
        )
        held = {key: tensors[f"{name}.{key}"] for key in after.state_dict()}
        after.load_state_dict(held, assign=True)
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, after)
    assert replace_linears(model, tmp_path) == list(written.modules)
    twin = written.twin()
    ids = torch.tensor([sturdy_tokens(twin, 2)])
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, twin(ids).logits, rtol=0.0, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("when", ["before", "after"])
def test_16_bit_models_before_and_after_a_forward(
    when: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    written = write_quantized(
        tmp_path, random_model(MODELS["llama"]), FORMS["ct-int8-dynamic"], margins={}
    )
    model = load(tmp_path, dtype)
    if when == "after":  # which decompresses
        model(IDS)
        assert model.get_submodule(UP).weight.dtype is dtype
    assert replace_linears(model) == list(written.modules)
    logits = model(IDS).logits
    assert logits.dtype is dtype
    expected, theirs = (x(IDS).logits.float() for x in (written.twin(), load(tmp_path, dtype)))
    assert (logits.float() - expected).norm() <= 1.5 * (theirs - expected).norm()


def test_factors_of_smoothquant_multiply_the_input(tmp_path: Path) -> None:
    plain = random_model(MODELS["llama"])
    written = write_quantized(tmp_path, plain, FORMS["modelopt-int8"], margins={})
    factors = torch.rand(plain.get_submodule(UP).in_features) + 0.5
    tensors = load_file(tmp_path / "model.safetensors")
    save(
        tmp_path,
        {**plain.config.to_dict(), "quantization_config": FORMS["modelopt-int8"].config},
        {**tensors, f"{UP}.pre_quant_scale": factors},
    )
    model = load(tmp_path)
    replace_linears(model)
    x = torch.randn(3, len(factors))
    expected = written.twin().get_submodule(UP)(x * factors)
    torch.testing.assert_close(model.get_submodule(UP)(x), expected, rtol=0.0, atol=1e-4)
    assert not torch.allclose(model.get_submodule(UP)(x), written.twin().get_submodule(UP)(x))


def merge(model: Any) -> None:
    model.get_submodule(UP).weight.data += 0.01 * torch.randn(48, 1) @ torch.randn(1, 32)


def hook(model: Any) -> None:
    model.get_submodule(UP).register_forward_hook(lambda *_: None)


def offload(model: Any) -> None:
    model.get_submodule(UP).to_empty(device="meta")


class OtherLinear(nn.Linear):
    pass


def exchange(model: Any) -> None:
    model.model.layers[1].mlp.up_proj = OtherLinear(32, 48)


def adapt(model: Any) -> None:
    """As PEFT's layers are, whose class is called Linear, too."""
    model.get_submodule(UP).register_module("lora_A", nn.Identity())


class Linear(nn.Linear):
    pass


def rename(model: Any) -> None:
    model.get_submodule(UP).__class__ = Linear


def patch(model: Any) -> None:
    up = model.get_submodule(UP)
    up.forward = lambda x: 3 * nn.functional.linear(x, up.weight)


def zero(model: Any) -> None:
    model.get_submodule(UP).weight.data.zero_()


def prune(model: Any) -> None:
    model.get_submodule(UP).weight.data[:24] = 0


def halve(model: Any) -> None:
    model.get_submodule(UP).weight.data *= 0.5


def negate(model: Any) -> None:
    model.get_submodule(UP).weight.data.neg_()


def scale_rows(model: Any) -> None:
    model.get_submodule(UP).weight.data *= torch.linspace(0.2, 3, 48)[:, None]


CHANGED = "not what the checkpoint holds"


def widen(model: Any) -> None:
    model.model.layers[1].mlp.up_proj = nn.Linear(32, 52, bias=False)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (merge, "not what the checkpoint holds, as after merging an adapter"),
        (hook, "it has hooks"),
        (offload, "on the meta device"),
        (exchange, "its class .*OtherLinear is none of Linear, FP8Linear"),
        (adapt, "it has modules of its own, as an adapter has"),
        (rename, r"its class .*linears\.Linear is none of Linear, FP8Linear"),
        (patch, "its forward has been replaced"),
        (zero, CHANGED),
        (prune, CHANGED),
        (halve, CHANGED),
        (negate, CHANGED),
        (scale_rows, CHANGED),
        (widen, r"up_proj.weight: got shape \[48, 32\], expected \[52, 32\]"),
    ],
)
def test_what_cannot_be_replaced_is_left_and_said(
    change: Callable[[Any], None], words: str, tmp_path: Path
) -> None:
    model = of_format(tmp_path, "modelopt-fp8-per-token")
    change(model)
    outcome = quantize_linears(model)
    assert len(outcome.replaced) == 13
    assert list(outcome.left) == [UP]
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(outcome.left[UP])
    assert not isinstance(model.get_submodule(UP), QuantizedLinear)


@pytest.mark.parametrize("change", [merge, zero, prune, halve, negate, scale_rows])
@pytest.mark.parametrize("form", ["ct-int8-dynamic", "ct-fp8-static"])
def test_a_change_after_decompression_is_noticed(
    form: str, change: Callable[[Any], None], tmp_path: Path
) -> None:
    model = of_format(tmp_path, form)
    model(torch.tensor([[3, 41]]))  # which decompresses it
    change(model)
    outcome = quantize_linears(model)
    assert list(outcome.left) == [UP]
    assert CHANGED in outcome.left[UP]


def test_a_changed_bias_is_noticed(tmp_path: Path) -> None:
    write_quantized(tmp_path, random_model(MODELS["llama-biases"]), FORMS["modelopt-int8"])
    model = load(tmp_path)
    model.get_submodule(UP).bias.data[7] += 0.1
    assert list(quantize_linears(model).left) == [UP]


def test_plain_models_have_nothing_to_replace(tmp_path: Path) -> None:
    plain = random_model(MODELS["llama"])
    assert replace_linears(plain) == []
    plain.save_pretrained(tmp_path)
    assert replace_linears(load(tmp_path)) == []


def test_bad_arguments_are_named(tmp_path: Path) -> None:
    model = of_format(tmp_path)
    with pytest.raises(TypeError, match=r"model: got str, expected a torch\.nn\.Module"):
        replace_linears("model")  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match=r"checkpoint: got .*nowhere"):
        replace_linears(model, tmp_path / "nowhere")
    with pytest.raises(TypeError, match=r"model: got dtype torch\.float64, expected"):
        replace_linears(load(tmp_path).double(), tmp_path)
    model.config._name_or_path = model.name_or_path = ""
    with pytest.raises(ValueError, match="checkpoint: got None for a quantised model"):
        replace_linears(model)
    config = {**model.config.to_dict(), "quantization_config": {"quant_method": "awq"}}
    save(tmp_path, config, {})
    with pytest.raises(UnsupportedCheckpointError, match="quant_method: got 'awq'"):
        replace_linears(model, tmp_path)


def test_a_replaced_module_says_what_it_cannot_do(tmp_path: Path) -> None:
    model = of_format(tmp_path)
    replace_linears(model)
    module = model.get_submodule(UP)
    with pytest.raises(ValueError, match="x: got a tensor that requires a gradient"):
        module(torch.randn(2, 32, requires_grad=True))
    with pytest.raises(RuntimeError, match=f"{UP}: got a state dict asked for after"):
        module.state_dict(prefix=f"{UP}.")
    with pytest.raises(RuntimeError, match=r"model: got a move to torch\.float64 on cpu after"):
        module.double()
    assert module.to("cpu", torch.float32) is module
    assert "in_features=32, out_features=48, layer=W8A8Linear" in repr(module)


def test_copies_of_a_model_compute_the_same(tmp_path: Path) -> None:
    model = of_format(tmp_path)
    replace_linears(model)
    expected = model(IDS).logits
    copied = copy.deepcopy(model)
    for buffer in model.get_submodule(UP).buffers():
        buffer.zero_()
    assert torch.equal(copied(IDS).logits, expected)
    assert not torch.equal(model(IDS).logits, expected)


def test_weights_are_held_once(tmp_path: Path) -> None:
    """What is replaced keeps the 8-bit weight, its scales, and nothing of the old module."""
    model = of_format(tmp_path)
    before = sum(x.nbytes for x in model.get_submodule(UP).parameters())
    replace_linears(model)
    held = list(model.get_submodule(UP).buffers())
    assert sum(x.nbytes for x in held) <= before
    assert not list(model.get_submodule(UP).parameters())


def test_strided_and_batched_inputs(tmp_path: Path) -> None:
    model = of_format(tmp_path)
    replace_linears(model)
    module = model.get_submodule(UP)
    x = torch.randn(32, 5, 2)
    expected = torch.stack([module(row) for row in x.permute(2, 1, 0)])
    assert torch.equal(module(x.permute(2, 1, 0)), expected)
    assert module(torch.randn(0, 32)).shape == (0, 48)
