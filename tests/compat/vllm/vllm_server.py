"""A model of vLLM on the CPU, its linear layers and attention ours, as a server would run it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from vllm.config import (
    CacheConfig,
    CompilationConfig,
    CompilationMode,
    DeviceConfig,
    ModelConfig,
    PassConfig,
    VllmConfig,
    set_current_vllm_config,
)
from vllm.forward_context import set_forward_context
from vllm.model_executor.kernels import linear
from vllm.model_executor.model_loader import get_model
from vllm.platforms import PlatformEnum, current_platform
from vllm.v1.worker.utils import customize_attention_spec
from vllm_batches import LAYOUTS, cache_of, common_of

from ostinato.compat.vllm.attention_metadata import OstinatoMetadataBuilder
from ostinato.compat.vllm.attention_registry import PATH

CPU = torch.device("cpu")


def as_on_cuda(
    setattr_: Callable[[Any, str, Any], None], setitem: Callable[[Any, Any, Any], None]
) -> None:
    """Let vLLM's model of a platform without kernels choose ours.

    Args:
        setattr_: sets an attribute, as pytest's MonkeyPatch or the builtin function.
        setitem: sets an item of a dict.
    """
    platform, kernels = type(current_platform), linear._POSSIBLE_INT8_KERNELS
    setattr_(platform, "get_attn_backend_cls", lambda *_, **__: PATH)
    setitem(kernels, platform._enum, kernels[PlatformEnum.CUDA])
    setattr_(torch.accelerator, "empty_cache", lambda: None)


def compiled_by_pieces() -> CompilationConfig:
    """Return vLLM's own compilation, cut at attention, without inductor and fusions on a GPU."""
    fusions = [name for name in vars(PassConfig()) if name.startswith("fuse_")]
    config = CompilationConfig(
        mode=CompilationMode.VLLM_COMPILE,
        backend="eager",
        custom_ops=["none"],
        cudagraph_mode="NONE",
        splitting_ops=["vllm::unified_attention_with_output", "vllm::unified_kv_cache_update"],
        pass_config=PassConfig(**dict.fromkeys([*fusions, "enable_qk_norm_rope_fusion"], False)),
    )
    config.compile_sizes = []  # which a runner on a GPU sets
    return config


class Server:
    """vLLM's model with what its runner does: caches, page tables, metadata, greedy tokens.

    Args:
        folder: of a checkpoint.
        kv_cache_dtype: by vLLM's name.
        quantization: likewise.
        compilation: vLLM's config of it; by default nothing is compiled.
    """

    def __init__(
        self,
        folder: Path,
        kv_cache_dtype: str = "auto",
        quantization: Any = None,
        compilation: CompilationConfig | None = None,
    ) -> None:
        self.config = VllmConfig(
            model_config=ModelConfig(
                str(folder), dtype="bfloat16", quantization=quantization, skip_tokenizer_init=True
            ),
            cache_config=CacheConfig(cache_dtype=kv_cache_dtype, block_size=16),
            device_config=DeviceConfig(device="cpu"),
            compilation_config=compilation or CompilationConfig(mode=0, custom_ops=["none"]),
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
