"""Bytes that a decode step reads, and its operations."""

from __future__ import annotations

from ...models import Decoder, KVFormat, ModelConfig
from ...models.experts.config import ExpertsConfig


def weight_bytes(model: Decoder, batch: int) -> int:
    """Bytes of the weights that one step reads.

    Not the tables of which it gathers a few rows, and of a layer's experts as many as
    `expected_experts` says of a batch.
    """
    tables = model.tables()
    every = sum(
        tensor.nbytes for tensor in model.tensors() if not any(tensor is table for table in tables)
    )
    config = model.config.experts
    if config is None:
        return every
    of_experts = sum(tensor.nbytes for use in model.experts() for tensor in use.experts.tensors())
    left = 1 - expected_experts(config, batch) / config.num_experts
    return every - round(left * of_experts)


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
    """Return how many weights of the layers a token is multiplied by, and of the output projection.

    Of a mixture of experts these are the weights of the token's own.
    """
    *layers, head = (n * k for n, k in (use.linear.shape for use in model.linears()))
    top_k = model.config.experts.top_k if model.config.experts is not None else 0
    of_experts = sum(n * k for n, k in (use.experts.shape for use in model.experts()))
    return sum(layers) + top_k * of_experts, head


def expected_experts(config: ExpertsConfig, tokens: int) -> float:
    """Return how many experts of a layer tokens go to, on average, that choose evenly at random.

    A step reads the weights of these alone.
    """
    missed = (1 - config.top_k / config.num_experts) ** tokens
    return config.num_experts * (1 - missed)


def attention_flops(config: ModelConfig, batch: int, context: int) -> int:
    """Multiplications and additions of one step's attention, in all layers."""
    return 4 * batch * config.q_size * _attended(config, context)


def _attended(config: ModelConfig, context: int) -> int:
    """Keys that one query attends to, over all layers."""
    return sum(min(context, window or context) for window in config.sliding_windows)
