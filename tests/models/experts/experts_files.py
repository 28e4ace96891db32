"""Checkpoint folders of small models with experts, stored one by one or together."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from hf_models import SHAPE
from safetensors.torch import load_file, save_file
from transformers import Qwen3MoeConfig

QWEN = Qwen3MoeConfig(
    **{**SHAPE, "num_hidden_layers": 1},
    head_dim=16,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=24,
    norm_topk_prob=True,
)
# Whose blocks of 128 rows are of the gate or of up alone, also where both are one tensor.
QWEN_BLOCKS = Qwen3MoeConfig(**{**QWEN.to_dict(), "moe_intermediate_size": 128})
EXPERTS = "model.layers.0.mlp.experts"


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def rewrite(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def edit_config(folder: Path, **fields: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def stack_experts(folder: Path, count: int) -> None:
    """Store the experts of the first layer together, as newer versions of transformers do."""
    tensors = tensors_in(folder)
    for kind, suffix in (("weight", ""), ("weight_scale", "_scale")):
        for name, parts in (
            ("gate_up_proj", ("gate_proj", "up_proj")),
            ("down_proj", ("down_proj",)),
        ):
            names = [[f"{EXPERTS}.{i}.{part}.{kind}" for part in parts] for i in range(count)]
            if names[0][0] in tensors:
                every = [torch.cat([tensors.pop(part) for part in each]) for each in names]
                tensors[f"{EXPERTS}.{name}{suffix}"] = torch.stack(every)
    rewrite(folder, tensors)
