"""Bytes that a decode step reads, and its operations."""

from __future__ import annotations

from ...models import (
    Llama,
    ModelConfig,
)


def weight_bytes(model: Llama) -> int:
    """Bytes of the weights that one step reads: not the tables of which it gathers a few rows."""
    gathered = [model.cos_sin]
    if model.lm_head.weight is not model.embedding:
        gathered.append(model.embedding)
    return sum(
        tensor.nbytes
        for tensor in model.tensors()
        if not any(tensor is table for table in gathered)
    )


def kv_bytes(config: ModelConfig, batch: int, context: int) -> int:
    """Bytes of the keys and values that one step reads."""
    return batch * _attended(config, context) * 2 * config.kv_size * config.dtype.itemsize


def step_flops(model: Llama, batch: int, context: int) -> int:
    """Multiplications and additions of one step's linear layers and attention."""
    weights = _layer_weights(model) + model.lm_head.weight.shape.numel()
    return 2 * batch * weights + attention_flops(model.config, batch, context)


def prompt_flops(model: Llama, batch: int, prompt: int) -> int:
    """Multiplications and additions of as many prompts' layers and attention, and last logits."""
    head = model.lm_head.weight.shape.numel()
    attention = sum(attention_flops(model.config, 1, end) for end in range(1, prompt + 1))
    return batch * (2 * (prompt * _layer_weights(model) + head) + attention)


def _layer_weights(model: Llama) -> int:
    linears = [
        linear
        for layer in model.layers
        for linear in (layer.qkv, layer.o, layer.gate_up, layer.down)
    ]
    return sum(linear.weight.shape.numel() for linear in linears)


def attention_flops(config: ModelConfig, batch: int, context: int) -> int:
    """Multiplications and additions of one step's attention, in all layers."""
    return 4 * batch * config.q_size * _attended(config, context)


def _attended(config: ModelConfig, context: int) -> int:
    """Keys that one query attends to, over all layers."""
    return sum(min(context, window or context) for window in config.sliding_windows)
