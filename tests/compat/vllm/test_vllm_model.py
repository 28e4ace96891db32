"""A trained checkpoint in vLLM's own Llama, its linear layers and attention ours, on the CPU."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm.compilation.counter import compilation_counter
from vllm.config import set_current_vllm_config
from vllm.platforms import current_platform
from vllm_server import Server, as_on_cuda, compiled_by_pieces

from ostinato.checkpoint import load_model, load_tokenizer
from ostinato.compat.vllm.dense import OstinatoLinearMethod
from ostinato.compat.vllm.int8_kernel import OstinatoInt8LinearKernel
from ostinato.engine import Engine, SamplingParams

FOLDER = Path(__file__).parents[3] / "examples" / "tiny-llama"
PROMPTS = ["Classes", "A list display is", "If an exception occurs in the try clause"]
# Tokens that are the same: rounding of an 8-bit cache changes later ones.
SAME = {"auto": 8, "int8_per_token_head": 4, "fp8_per_token_head": 4}


@pytest.fixture
def _as_on_cuda(hopper: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    as_on_cuda(monkeypatch.setattr, monkeypatch.setitem)
    yield
    torch.set_default_dtype(torch.float32)


def continued(folder: Path, tokens: int) -> tuple[list[list[int]], list[list[int]]]:
    """Return the prompts' tokens, and how our engine goes on with a checkpoint's model."""
    tokenizer = load_tokenizer(folder)
    engine = Engine(load_model(folder, device="cpu"), tokenizer, max_batch=4)
    engine.capture([4], progress=False)
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    after = [list(completion.token_ids) for completion in engine.generate(PROMPTS, params)]
    return [tokenizer.encode(prompt).ids for prompt in PROMPTS], after


@pytest.mark.usefixtures("_as_on_cuda")
@pytest.mark.parametrize("kv_cache_dtype", SAME)
def test_vllms_model_continues_as_our_engine_does(kv_cache_dtype: str) -> None:
    prompts, expected = continued(FOLDER, SAME[kv_cache_dtype])
    server = Server(FOLDER, kv_cache_dtype)
    schemes = [m.scheme for m in server.model.modules() if hasattr(m, "scheme")]
    assert [type(s.kernel) for s in schemes] == [OstinatoInt8LinearKernel] * 16
    assert server.greedy(prompts, SAME[kv_cache_dtype]) == expected


@pytest.mark.usefixtures("_as_on_cuda")
def test_a_16_bit_model_continues_as_our_engine_does(tmp_path: Path) -> None:
    weights = load_file(FOLDER / "model.safetensors")
    scales = {name: weights.pop(name) for name in list(weights) if name.endswith("_scale")}
    for name, scale in scales.items():
        of = name.removesuffix("_scale")
        weights[of] = (weights[of].float() * scale.float()).to(torch.bfloat16)
    config = json.loads((FOLDER / "config.json").read_text(encoding="utf-8"))
    del config["quantization_config"]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    shutil.copy(FOLDER / "tokenizer.json", tmp_path)
    prompts, expected = continued(tmp_path, 8)
    server = Server(tmp_path, quantization="ostinato")
    methods = [getattr(m, "quant_method", None) for m in server.model.modules()]
    assert sum(isinstance(method, OstinatoLinearMethod) for method in methods) == 16
    assert server.greedy(prompts, 8) == expected


@pytest.mark.usefixtures("_as_on_cuda")
def test_a_model_that_vllm_compiles_continues_alike(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its layers are one graph for any number of tokens, which vLLM cuts at attention alone."""
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    monkeypatch.setenv("VLLM_DISABLE_COMPILE_CACHE", "1")
    monkeypatch.setattr(type(current_platform), "opaque_attention_op", classmethod(lambda _: True))
    prompts, expected = continued(FOLDER, 8)
    server = Server(FOLDER, compilation=compiled_by_pieces())
    seen = {"num_graphs_seen": 1, "num_piecewise_capturable_graphs_seen": 5}  # around four layers'
    with set_current_vllm_config(server.config), compilation_counter.expect(**seen):
        assert server.greedy(prompts, 8) == expected
