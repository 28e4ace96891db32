"""Bytes that a decode step reads, and its operations."""

from __future__ import annotations

from ...models import Decoder, KVFormat, ModelConfig


def weight_bytes(model: Decoder) -> int:
    """Bytes of the weights that one step reads: not the tables of which it gathers a few rows."""
    tables = model.tables()
    return sum(
        tensor.nbytes for tensor in model.tensors() if not any(tensor is table for table in tables)
    )


def kv_bytes(
    config: ModelConfig, batch: int, context: int, cache_format: KVFormat | None = None
) -> int:
    """Bytes of the keys and values that one step reads, with the scales of their tokens.

    The cache is in the model's dtype by default.
    """
    stored = KVFormat(config.dtype) if cache_format is None else cache_format
    return batch * _attended(config, context) * stored.token_bytes(config)


def step_flops(model: Decoder, batch: int, context: int) -> int:
    """Multiplications and additions of one step's linear layers and attention."""
    layers, head = _weights(model)
    return 2 * batch * (layers + head) + attention_flops(model.config, batch, context)


def prompt_flops(model: Decoder, batch: int, prompt: int) -> int:
    """Multiplications and additions of as many prompts' layers and attention, and last logits."""
    layers, head = _weights(model)
    attention = sum(attention_flops(model.config, 1, end) for end in range(1, prompt + 1))
    return batch * (2 * (prompt * layers + head) + attention)


def _weights(model: Decoder) -> tuple[int, int]:
    """Return how many weights the layers have, and the output projection."""
    *layers, head = (n * k for n, k in (use.linear.shape for use in model.linears()))
    return sum(layers), head


def attention_flops(config: ModelConfig, batch: int, context: int) -> int:
    """Multiplications and additions of one step's attention, in all layers."""
    return 4 * batch * config.q_size * _attended(config, context)


def _attended(config: ModelConfig, context: int) -> int:
    """Keys that one query attends to, over all layers."""
    return sum(min(context, window or context) for window in config.sliding_windows)
