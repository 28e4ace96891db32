"""The shape of a Llama-family decoder, read from a Hugging Face `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from .config_fields import (
    Fields,
    UnsupportedModelError,
)
from .rope import RopeConfig

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
# What these ids are when a file does not name them, in transformers; in other families: none.
_LLAMA_IDS = {"bos_token_id": 1, "eos_token_id": 2}
_DEFAULT_IDS = {"llama": _LLAMA_IDS, "mistral": _LLAMA_IDS}

_FULL, _SLIDING = "full_attention", "sliding_attention"

_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}


@dataclass(frozen=True)
class ModelConfig:
    """Everything that fixes the decoder's computation, and nothing about its weights' format.

    `sliding_windows` has one entry per layer: the number of keys a query sees, itself included,
    or None for full attention. `dtype` is that of the unquantised weights and the activations.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    sliding_windows: tuple[int | None, ...]
    rope: RopeConfig
    dtype: torch.dtype
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        sizes = (
            "vocab_size hidden_size intermediate_size num_layers num_heads num_kv_heads head_dim "
            "max_position_embeddings"
        )
        for name in sizes.split():
            if getattr(self, name) < 1:
                raise UnsupportedModelError(
                    f"{name}: got {getattr(self, name)}, expected at least 1"
                )
        if self.num_heads % self.num_kv_heads:
            raise UnsupportedModelError(
                f"num_heads: got {self.num_heads}, expected a multiple of "
                f"num_kv_heads = {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise UnsupportedModelError(
                f"head_dim: got {self.head_dim}, expected an even number, whose halves RoPE pairs"
            )
        if len(self.sliding_windows) != self.num_layers:
            raise UnsupportedModelError(
                f"sliding_windows: got {len(self.sliding_windows)} entries, "
                f"expected one per layer = {self.num_layers}"
            )

    @property
    def q_size(self) -> int:
        """Elements of one token's queries: num_heads * head_dim."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Elements of one token's keys (or values): num_kv_heads * head_dim."""
        return self.num_kv_heads * self.head_dim

    def context(self, wanted: int | None) -> int:
        """Return the longest sequence to serve: `wanted`, by default `max_position_embeddings`.

        Raises:
            ValueError: when `wanted`, the caller's `max_context`, exceeds the positions that the
                model was trained for or its RoPE is stretched to.
        """
        if wanted is None:
            return self.max_position_embeddings
        if not 1 <= wanted <= self.longest_context:
            name = "max_position_embeddings"
            if self.longest_context > self.max_position_embeddings:
                name = f"what {self.rope.type} RoPE is stretched to"
            raise ValueError(
                f"max_context: got {wanted}, expected 1 to {name} = {self.longest_context}"
            )
        return wanted

    @property
    def longest_context(self) -> int:
        """Positions that the model was trained for, or that its RoPE is stretched to."""
        return self.rope.longest_context(self.max_position_embeddings)

    @staticmethod
    def from_hf(config: Mapping[str, Any], where: str = "config.json") -> ModelConfig:
        """Translate the contents of `config.json`, of transformers 4 or 5.

        Fields that transformers fills in differently from family to family, and that change the
        computation, must be written; other absent ones get its defaults.

        Args:
            config: the contents.
            where: what they come from, for messages.

        Raises:
            UnsupportedModelError: naming the field, for an architecture, activation or RoPE
                scaling that this runtime does not implement, or a field that is missing or
                malformed.
        """
        family = Fields(where, config).choice("model_type", *_ARCHITECTURES)
        fields = Fields(where, {**_DEFAULT_IDS.get(family, {}), **config})
        if not set(fields.strings("architectures")) <= {_ARCHITECTURES[family]}:
            raise fields.wrong("architectures", repr([_ARCHITECTURES[family]]))
        fields.choice("hidden_act", "silu", default="silu")
        vocab_size = fields.integer("vocab_size")
        num_layers = fields.integer("num_hidden_layers")
        num_heads = fields.integer("num_attention_heads")
        if family != "llama":
            fields.require("num_key_value_heads")
        max_positions = fields.integer("max_position_embeddings")
        bias = fields.boolean("attention_bias", False)
        last_id = vocab_size - 1
        return ModelConfig(
            family=family,
            vocab_size=vocab_size,
            hidden_size=fields.integer("hidden_size"),
            intermediate_size=fields.integer("intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=fields.integer("num_key_value_heads", num_heads),
            head_dim=_head_dim(fields, family),
            rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
            max_position_embeddings=max_positions,
            tie_word_embeddings=fields.boolean("tie_word_embeddings", False),
            # Qwen2 always has a bias on q, k, v and never on o; the others say so themselves.
            qkv_bias=bias or family == "qwen2",
            o_bias=bias and family != "qwen2",
            mlp_bias=fields.boolean("mlp_bias", False),
            qk_norm=family == "qwen3",
            sliding_windows=_sliding_windows(fields, family, num_layers),
            rope=RopeConfig.from_hf(config, max_positions, where),
            dtype=_dtype(fields),
            bos_token_id=fields.optional_integer("bos_token_id", least=0, most=last_id),
            eos_token_ids=fields.integers("eos_token_id", least=0, most=last_id),
        )


def _head_dim(fields: Fields, family: str) -> int:
    if family == "qwen3" or fields.get("head_dim") is not None:
        return fields.integer("head_dim")
    hidden_size = fields.integer("hidden_size")
    num_heads = fields.integer("num_attention_heads")
    if hidden_size % num_heads:
        raise fields.wrong(
            "hidden_size", f"a multiple of num_attention_heads = {num_heads} without a head_dim"
        )
    return hidden_size // num_heads


def _dtype(fields: Fields) -> torch.dtype:
    spelling = "torch_dtype" if fields.get("dtype") is None else "dtype"
    return _DTYPES[fields.choice(spelling, *_DTYPES, default="float32")]


def _sliding_windows(fields: Fields, family: str, num_layers: int) -> tuple[int | None, ...]:
    mixed = family in ("qwen2", "qwen3")  # these may have a window on some layers only
    window = None
    if family == "mistral" or (mixed and fields.boolean("use_sliding_window", False)):
        fields.require("sliding_window")
        window = fields.optional_integer("sliding_window")
    written = fields.strings("layer_types")
    if mixed and window is not None:
        expected = f"{num_layers} times {_FULL!r} or {_SLIDING!r}"
        if not written:
            first = fields.integer("max_window_layers", least=0)
            return tuple(window if layer >= first else None for layer in range(num_layers))
        fits = len(written) == num_layers and set(written) <= {_FULL, _SLIDING}
    else:
        kind = _FULL if window is None else _SLIDING
        expected = f"{num_layers} times {kind!r}"
        written = written or (kind,) * num_layers
        fits = written == (kind,) * num_layers
    if not fits:
        raise fields.wrong("layer_types", expected)
    return tuple(window if kind == _SLIDING else None for kind in written)
