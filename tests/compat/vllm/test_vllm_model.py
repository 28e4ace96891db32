"""A trained checkpoint in vLLM's own Llama, its linear layers and attention ours, on the CPU."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm.config import (
    CacheConfig,
    CompilationConfig,
    DeviceConfig,
    ModelConfig,
    VllmConfig,
    set_current_vllm_config,
)
from vllm.forward_context import set_forward_context
from vllm.model_executor.kernels import linear
from vllm.model_executor.model_loader import get_model
from vllm.platforms import PlatformEnum, current_platform
from vllm.v1.worker.utils import customize_attention_spec
from vllm_batches import LAYOUTS, cache_of, common_of

from ostinato.checkpoint import load_model, load_tokenizer
from ostinato.compat.vllm.attention_metadata import OstinatoMetadataBuilder
from ostinato.compat.vllm.attention_registry import PATH
from ostinato.compat.vllm.dense import OstinatoLinearMethod
from ostinato.compat.vllm.int8_kernel import OstinatoInt8LinearKernel
from ostinato.engine import Engine, SamplingParams

FOLDER = Path(__file__).parents[3] / "examples" / "tiny-llama"
PROMPTS = ["Classes", "A list display is", "If an exception occurs in the try clause"]
# Tokens that are the same: rounding of an 8-bit cache changes later ones.
SAME = {"auto": 8, "int8_per_token_head": 4, "fp8_per_token_head": 4}
CPU = torch.device("cpu")


class Server:
    """vLLM's model with what its runner does: caches, page tables, metadata, greedy tokens."""

    def __init__(
        self, folder: Path, kv_cache_dtype: str = "auto", quantization: Any = None
    ) -> None:
        self.config = VllmConfig(
            model_config=ModelConfig(
                str(folder), dtype="bfloat16", quantization=quantization, skip_tokenizer_init=True
            ),
            cache_config=CacheConfig(cache_dtype=kv_cache_dtype, block_size=16),
            device_config=DeviceConfig(device="cpu"),
            compilation_config=CompilationConfig(mode=0, custom_ops=["none"]),
        )
        with set_current_vllm_config(self.config):
            self.model: Any = get_model(vllm_config=self.config)
        self.layers = self.config.compilation_config.static_forward_context
        first: Any = next(iter(self.layers.values()))
        spec = customize_attention_spec(first.attn_backend, first.get_kv_cache_spec(self.config))
        for layer in self.layers.values():
            layer.kv_cache = cache_of(spec, LAYOUTS[0], 40, CPU)
        self.builder = OstinatoMetadataBuilder(spec, list(self.layers), self.config, CPU)
        self.table = torch.randperm(40)[:36].view(3, 12).to(torch.int32)

    @torch.inference_mode()
    def greedy(self, prompts: list[list[int]], steps: int) -> list[list[int]]:
        """Return the tokens that follow each prompt: all prompts at once, then step by step."""
        texts, done = [list(prompt) for prompt in prompts], [0] * len(prompts)
        for _ in range(steps):
            news = [text[n:] for text, n in zip(texts, done, strict=True)]
            places = [range(n, len(text)) for text, n in zip(texts, done, strict=True)]
            common = common_of(
                [len(new) for new in news], [len(text) for text in texts], self.table
            )
            metadata = self.builder.build(0, common)
            tokens, positions = (torch.tensor([x for xs in s for x in xs]) for s in (news, places))
            with set_forward_context(
                dict.fromkeys(self.layers, metadata),
                self.config,
                num_tokens=len(tokens),
                slot_mapping=dict.fromkeys(self.layers, common.slot_mapping),
            ):
                hidden = self.model(tokens, positions, None, None)
            last = common.query_start_loc[1:].long() - 1
            chosen = self.model.compute_logits(hidden[last]).argmax(1).tolist()
            done = [len(text) for text in texts]
            for text, token in zip(texts, chosen, strict=True):
                text.append(token)
        return [text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)]


@pytest.fixture
def _as_on_cuda(hopper: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let vLLM's model of a platform without kernels choose ours."""
    platform, kernels = type(current_platform), linear._POSSIBLE_INT8_KERNELS
    monkeypatch.setattr(platform, "get_attn_backend_cls", lambda *_, **__: PATH)
    monkeypatch.setitem(kernels, platform._enum, kernels[PlatformEnum.CUDA])
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
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
