"""Small random transformers models, and the checkpoint folders that hold them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

SHAPE: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}

# Longer than every window and every original context below, so that their effects show.
TOKENS = [(7 * index * index + 3) % SHAPE["vocab_size"] for index in range(40)]


def rope(kind: str, **fields: Any) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": 10000.0, **fields}


MODELS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SHAPE),
    "llama-tied": LlamaConfig(**{**SHAPE, "tie_word_embeddings": True}),
    "llama-biases": LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True),
    "llama-head-dim": LlamaConfig(**SHAPE, head_dim=16),
    "llama-linear": LlamaConfig(**SHAPE, rope_parameters=rope("linear", factor=2.0)),
    "llama-llama3": LlamaConfig(
        **SHAPE,
        rope_parameters=rope(
            "llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=16,
        ),
    ),
    "llama-yarn": LlamaConfig(
        **SHAPE,
        rope_parameters=rope("yarn", factor=4.0, original_max_position_embeddings=16),
    ),
    "mistral": MistralConfig(**SHAPE, sliding_window=None),
    "mistral-window": MistralConfig(**SHAPE, sliding_window=8),
    "qwen2": Qwen2Config(**SHAPE),
    "qwen2-tied-window": Qwen2Config(
        **{**SHAPE, "tie_word_embeddings": True},
        use_sliding_window=True,
        sliding_window=8,
        max_window_layers=1,
    ),
    "qwen3": Qwen3Config(**SHAPE, head_dim=16),
    "qwen3-tied": Qwen3Config(**{**SHAPE, "tie_word_embeddings": True}, head_dim=8),
}


def random_model(config: PreTrainedConfig) -> PreTrainedModel:
    """Return an fp32 model whose every parameter, biases and norms included, is random."""
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        values = torch.randn(parameter.shape, generator=generator)
        if name.endswith("norm.weight"):
            values = 1 + 0.2 * values
        elif parameter.ndim == 2:
            values *= 1.5 / parameter.shape[1] ** 0.5
        parameter.data = values
    model.tie_weights()
    return model


def tensors_of(model: PreTrainedModel, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Return the tensors a checkpoint of the model holds; tied weights are there once."""
    tensors = {name: tensor.to(dtype).contiguous() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    return tensors


def config_of(model: PreTrainedModel, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Return the contents of the model's `config.json`."""
    name = type(model).__name__
    return {
        **model.config.to_dict(),
        "architectures": [name],
        "dtype": str(dtype).removeprefix("torch."),
    }


def save(folder: Path, config: dict[str, Any], *shards: dict[str, torch.Tensor]) -> Path:
    """Write a checkpoint folder: one file, or a file per shard and their index."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if len(shards) == 1:
        save_file(shards[0], folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    names = [
        f"model-{index + 1:05}-of-{len(shards):05}.safetensors" for index in range(len(shards))
    ]
    weight_map: dict[str, str] = {}
    for name, shard in zip(names, shards, strict=True):
        save_file(shard, folder / name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(shard, name))
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def save_plain(folder: Path, model: PreTrainedModel, dtype: torch.dtype = torch.float32) -> Path:
    return save(folder, config_of(model, dtype), tensors_of(model, dtype))


@torch.no_grad()
def hf_logits(model: PreTrainedModel, tokens: list[int] = TOKENS) -> torch.Tensor:
    return model(torch.tensor([tokens])).logits[0].float()
