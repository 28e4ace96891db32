"""Models of transformers that compressed-tensors loads: it wraps forwards and moves parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hf_models import MODELS, random_model
from quantized_files import FORMATS, write_quantized
from transformers import AutoModelForCausalLM, CompileConfig

from ostinato import ops
from ostinato.compat.transformers import (
    NAME,
    QuantizedLinear,
    RaggedStaticCache,
    accelerate,
    replace_attention,
    replace_linears,
    replace_norms,
)

transformers.logging.set_verbosity_error()

IDS = torch.tensor([[3, 41, 17, 8, 60]])
OF_LAYER = {
    "llama": ("input_layernorm", "post_attention_layernorm"),
    "qwen3": (
        *("self_attn.q_norm", "self_attn.k_norm"),
        *("input_layernorm", "post_attention_layernorm"),
    ),
}


def load(folder: Path, name: str, format_name: str, **options: Any) -> Any:
    """Return a quantised model whose first forward has yet to come."""
    if not (folder / "config.json").exists():
        write_quantized(folder, random_model(MODELS[name]), FORMATS[format_name])
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)
    return model.eval().requires_grad_(False)


@pytest.mark.parametrize("when", ["before", "after"])  # the first forward, which decompresses
@pytest.mark.parametrize("format_name", ["ct-int8-static", "ct-int8-dynamic", "ct-fp8-static"])
@pytest.mark.parametrize("name", OF_LAYER)
def test_norms_of_a_compressed_model_are_replaced(
    name: str, format_name: str, when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"model.layers.{i}.{norm}" for i in range(2) for norm in OF_LAYER[name]]
    names.append("model.norm")
    expected = load(tmp_path, name, format_name)(IDS).logits
    model = load(tmp_path, name, format_name)
    if when == "after":
        model(IDS)
    weights = {norm: model.get_submodule(norm).weight.clone() for norm in names}
    assert replace_norms(model) == names
    assert replace_norms(model) == []
    assert all(torch.equal(model.get_submodule(norm).weight, w) for norm, w in weights.items())
    calls, rms_norm = [], ops.rms_norm
    monkeypatch.setattr(ops, "rms_norm", lambda *args: calls.append(1) or rms_norm(*args))
    logits = model(IDS).logits
    assert len(calls) == len(names)
    # Where an activation is as good as between two codes, it may get the other one.
    torch.testing.assert_close(logits, expected, rtol=0.0, atol=0.05)
    text = model.generate(IDS, max_new_tokens=4, do_sample=False, eos_token_id=None)
    assert text.shape == (1, 9)
    assert replace_norms(model) == []


@pytest.mark.parametrize("when", ["before", "after"])
def test_attention_of_a_compressed_model_is_replaced(when: str, tmp_path: Path) -> None:
    model = load(tmp_path, "llama", "ct-int8-static", attn_implementation=NAME)
    if when == "after":
        model(IDS)
    layers = [f"model.layers.{i}.self_attn" for i in range(2)]
    assert replace_attention(model) == layers
    assert replace_attention(model) == []
    plain = load(tmp_path, "llama", "ct-int8-static", attn_implementation=NAME)
    logits = []
    for each in (model, plain):
        cache = RaggedStaticCache(each, max_batch=1, max_length=16)
        rows = cache.rows(torch.tensor([5], dtype=torch.int32), tokens=5)
        out = each(IDS, past_key_values=rows, position_ids=rows.position_ids)
        assert cache.storage.any()
        logits.append(out.logits)
    torch.testing.assert_close(*logits, rtol=0.0, atol=0.05)


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_accelerated_step_is_compiled_whole(when: str, tmp_path: Path) -> None:
    model = load(tmp_path, "llama", "ct-int8-dynamic")
    if when == "after":
        model(IDS)
    accelerate(model)
    weights = {name: type(weight) for name, weight in model.named_parameters()}
    assert "model.embed_tokens.weight" in weights
    assert set(weights.values()) == {torch.nn.Parameter}
    whole = CompileConfig(fullgraph=True, backend="eager")
    whole._compile_all_devices = True
    greedy = {"do_sample": False, "max_new_tokens": 6, "eos_token_id": None}
    expected = model.generate(IDS, **greedy)
    torch._dynamo.reset()
    compiled = model.generate(IDS, **greedy, cache_implementation="static", compile_config=whole)
    assert torch.equal(compiled, expected)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0


def test_wrappers_stay_while_a_module_is_quantized(tmp_path: Path) -> None:
    model = load(tmp_path, "llama", "ct-int8-dynamic")
    expected = load(tmp_path, "llama", "ct-int8-dynamic")(IDS).logits
    left = model.model.layers[0].mlp.down_proj
    left.register_forward_hook(lambda *_: None)  # so it is not replaced
    assert "model.layers.0.mlp.down_proj" not in replace_linears(model)
    assert not isinstance(left, QuantizedLinear)
    # Without its hook the module that is left would multiply by codes.
    assert (model(IDS).logits - expected).norm() < 0.1 * expected.norm()
