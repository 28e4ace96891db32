"""transformers' Llama with random weights, beside which ours is measured."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any, Literal, TypeAlias

import torch

from ..shapes import SHAPES

# What a model attends by: torch's attention, as transformers has it by default, or ours.
Attention: TypeAlias = Literal["sdpa", "ostinato"]


def random_hugging_face_llama(
    shape: str,
    device: torch.device,
    *,
    attention: Attention = "sdpa",
    num_layers: int | None = None,
) -> Any:
    """Return a `LlamaForCausalLM` in bf16.

    Args:
        shape: one of `SHAPES` that is a Llama.
        device: where it lies.
        attention: what it attends by.
        num_layers: of the model; by default the shape's.

    Raises:
        ImportError: when transformers is not installed.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    fields = {name: value for name, value in SHAPES[shape].items() if name != "dtype"}
    if num_layers is not None:
        fields["num_hidden_layers"] = num_layers
    config: Any = LlamaConfig(**fields)
    if attention == "ostinato":
        import_module("ostinato.compat.transformers")  # registers it
    config._attn_implementation = attention
    with _made_on(device):
        return LlamaForCausalLM(config).eval()


def static_cache(model: Any, batch: int, places: int) -> Any:
    """Return a model's `StaticCache` of zeros, for so many tokens of each of `batch` sequences."""
    from transformers import StaticCache

    config, weight = model.config, model.lm_head.weight
    head_dim = model.model.layers[0].self_attn.head_dim
    cache: Any = StaticCache(config=config, max_cache_len=places)
    heads = config.num_key_value_heads
    cache.early_initialization(batch, heads, head_dim, weight.dtype, weight.device)
    return cache


@contextmanager
def _made_on(device: torch.device) -> Iterator[None]:
    """Make modules in bf16 on a device."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)
