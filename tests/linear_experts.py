"""Experts of transformers models as linear modules of their own, as quantised files hold them."""

from __future__ import annotations

import copy
import re

import torch
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel

# What these families call the modules of an expert in files.
_MIXTRAL = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
_OLDER_NAMES = ("mixtral", "minimax_m2")


class LinearExperts(nn.ModuleList):
    """What the experts of a layer compute: each token's in the order in which they were chosen."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        for gate_up, down in zip(experts.gate_up_proj.data, experts.down_proj.data, strict=True):
            gate, up = gate_up.chunk(2)
            weights = {"gate_proj": gate, "up_proj": up, "down_proj": down}
            self.append(nn.ModuleDict({name: _linear(w) for name, w in weights.items()}))

    def forward(
        self, x: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        total = torch.zeros_like(x)
        for slot, weights in zip(top_k_index.T, top_k_weights.T, strict=True):
            for index, expert in enumerate(self):
                tokens = slot == index
                if tokens.any():
                    inner = functional.silu(expert["gate_proj"](x[tokens]))
                    y = expert["down_proj"](inner * expert["up_proj"](x[tokens]))
                    total[tokens] += weights[tokens, None] * y
        return total


def _linear(weight: torch.Tensor) -> nn.Linear:
    module = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    module.weight.data = weight.clone()
    return module


def with_linear_experts(model: PreTrainedModel) -> PreTrainedModel:
    """Return a model, or a copy whose experts are linear modules where it has some."""
    names = [name for name, module in model.named_modules() if hasattr(module, "gate_up_proj")]
    names = [name for name in names if name.endswith(".experts")]
    if not names:
        return model
    changed = copy.deepcopy(model)
    for name in names:
        parent, _, child = name.rpartition(".")
        experts = LinearExperts(model.get_submodule(name))
        setattr(changed.get_submodule(parent), child, experts)
    return changed


def file_name(model: PreTrainedModel, name: str) -> str:
    """Return what files call a module or tensor of experts that are linear modules."""
    if model.config.model_type not in _OLDER_NAMES:
        return name
    return re.sub(
        r"\.(?:mlp|block_sparse_moe)(\.experts\.\d+\.)(gate_proj|up_proj|down_proj)",
        lambda found: f".block_sparse_moe{found[1]}{_MIXTRAL[found[2]]}",
        name,
    )
