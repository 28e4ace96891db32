"""A decoder of any shape with random weights, made on the device."""

from __future__ import annotations

import torch

from ..checkpoint.weights import quantize_weight
from ..models import (
    AnyLinear,
    DecoderLayer,
    Linear,
    Llama,
    ModelConfig,
    W8A8Linear,
)
from .shapes import PRECISIONS

_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn, "bf16": torch.bfloat16}
_DTYPES |= {"fp16": torch.float16, "fp32": torch.float32}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def precision(model: Llama) -> str:
    """Return how the linear layers compute: "int8", "fp8", "bf16", "fp16" or "fp32"."""
    return dtype_name(model.layers[0].qkv.weight.dtype)


def dtype_name(dtype: torch.dtype) -> str:
    """Return "int8", "fp8", "bf16", "fp16" or "fp32"."""
    return _NAMES[dtype]


def dtype_named(name: str) -> torch.dtype:
    """Return the dtype that `dtype_name` calls so."""
    return _DTYPES[name]


def random_llama(
    config: ModelConfig,
    precision: str,
    device: torch.device,
    *,
    max_context: int,
    lm_head: str = "bf16",
    batch_invariant: bool = True,
) -> Llama:
    """Return a decoder with random weights that keep activations of order one.

    8-bit ones are normal numbers quantised as a checkpoint's are. Its kernels are not compiled:
    `compile_kernels` does that.

    Args:
        config: shape of the model; only bf16 models are made, without biases.
        precision: of the linear layers but the output projection: one of `PRECISIONS`.
        device: where the weights are made.
        max_context: longest sequence served.
        lm_head: precision of the output projection.
        batch_invariant: as of `load_model`.

    Raises:
        ValueError: for another precision, or a `max_context` that the model does not have.
    """
    for name, value in (("precision", precision), ("lm_head", lm_head)):
        if value not in PRECISIONS:
            raise ValueError(f"{name}: got {value!r}, expected one of {', '.join(PRECISIONS)}")
    generator = torch.Generator(device).manual_seed(0)

    def normal(rows: int, columns: int) -> torch.Tensor:
        weight = torch.empty(rows, columns, dtype=torch.bfloat16, device=device)
        return weight.normal_(std=columns**-0.5, generator=generator)

    def linear(
        rows: int, columns: int, dtype: str = precision, out: torch.dtype = torch.bfloat16
    ) -> AnyLinear:
        if dtype == "bf16":
            return Linear(normal(rows, columns))
        weight, scale = quantize_weight(normal(rows, columns), dtype_named(dtype), torch.float32)
        return W8A8Linear(weight, scale[:, 0], out, batch_invariant=batch_invariant)

    def ones(size: int) -> torch.Tensor:
        return torch.ones(size, dtype=torch.bfloat16, device=device)

    hidden, head_dim = config.hidden_size, config.head_dim
    layers = [
        DecoderLayer(
            input_norm=ones(hidden),
            qkv=linear(config.q_size + 2 * config.kv_size, hidden),
            o=linear(hidden, config.q_size),
            post_attention_norm=ones(hidden),
            gate_up=linear(2 * config.intermediate_size, hidden),
            down=linear(hidden, config.intermediate_size),
            q_norm=ones(head_dim) if config.qk_norm else None,
            k_norm=ones(head_dim) if config.qk_norm else None,
        )
        for _ in range(config.num_layers)
    ]
    embedding = normal(config.vocab_size, hidden)
    if config.tie_word_embeddings and lm_head == "bf16":
        head: AnyLinear = Linear(embedding)
    else:
        head = linear(config.vocab_size, hidden, lm_head, torch.float32)
    return Llama(
        config,
        embedding,
        layers,
        ones(hidden),
        head,
        max_context=max_context,
        batch_invariant=batch_invariant,
    )
