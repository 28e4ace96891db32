"""Random weights of models that vLLM has made without a checkpoint.

Dummy weights are near zero, where a GPU takes less power and may be faster.
"""

from __future__ import annotations

from typing import Any

import torch

_SCALE = 0.02 / 73.3  # 73.3 is the deviation of INT8 codes that are drawn evenly


def fill_randomly(name: str, x: torch.Tensor, generator: torch.Generator) -> None:
    """Overwrite a parameter: weights and biases get a deviation of 0.02, norms 1.

    Others, such as scales of a KV cache, stay as they are.
    """
    if name.endswith("weight_scale"):
        x.fill_(_SCALE)
    elif "norm" in name:
        x.fill_(1)
    elif x.dtype == torch.int8:
        x.random_(-127, 128, generator=generator)
    elif x.is_floating_point() and (x.dim() >= 2 or name.endswith("bias")):
        x.normal_(0, 0.02, generator=generator)


def fill_model(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Fill all parameters, which one seed makes the same in each process, and return them."""
    parameters = [(name, parameter.data) for name, parameter in model.named_parameters()]
    device = parameters[0][1].device
    generator = torch.Generator(device).manual_seed(1)
    for name, x in parameters:
        fill_randomly(name, x, generator)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return parameters


class RandomWeights:
    """An extension of vLLM's worker (`worker_extension_cls`): it can give itself random weights."""

    def fill_randomly(self: Any) -> int:
        """Fill all parameters, and return how many there are."""
        return len(fill_model(self.get_model()))
