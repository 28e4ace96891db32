"""The shape of a Llama-family decoder, read from a Hugging Face `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ostinato.model.rope import RopeConfig, UnsupportedModelError

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
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
        """Return the longest sequence to serve: `wanted`, by default all trained positions.

        Raises:
            ValueError: when `wanted`, the caller's `max_context`, exceeds the trained positions.
        """
        trained = self.max_position_embeddings
        if wanted is None:
            return trained
        if not 1 <= wanted <= trained:
            raise ValueError(
                f"max_context: got {wanted}, expected 1 to max_position_embeddings = {trained}"
            )
        return wanted

    @staticmethod
    def from_hf(config: Mapping[str, Any]) -> ModelConfig:
        """Translate the contents of `config.json`, of transformers 4 or 5.

        Raises:
            UnsupportedModelError: for an architecture, activation, RoPE scaling or field that
                this runtime does not implement, or a field that is missing.
        """
        family = config.get("model_type")
        if family not in _ARCHITECTURES:
            raise UnsupportedModelError(
                f"model_type: got {family!r}, expected one of {', '.join(_ARCHITECTURES)}"
            )
        for name in config.get("architectures") or ():
            if name != _ARCHITECTURES[family]:
                raise UnsupportedModelError(
                    f"architectures: got {name!r}, expected {_ARCHITECTURES[family]!r}"
                )
        activation = config.get("hidden_act", "silu")
        if activation != "silu":
            raise UnsupportedModelError(f"hidden_act: got {activation!r}, expected 'silu'")

        num_layers = _required(config, "num_hidden_layers")
        num_heads = _required(config, "num_attention_heads")
        hidden_size = _required(config, "hidden_size")
        max_positions = int(config.get("max_position_embeddings") or 2048)
        bias = bool(config.get("attention_bias", False))
        return ModelConfig(
            family=family,
            vocab_size=_required(config, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=_required(config, "intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=int(config.get("num_key_value_heads") or num_heads),
            head_dim=int(config.get("head_dim") or hidden_size // num_heads),
            rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            max_position_embeddings=max_positions,
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            # Qwen2 always has a bias on q, k, v and never on o; the others say so themselves.
            qkv_bias=bias or family == "qwen2",
            o_bias=bias and family != "qwen2",
            mlp_bias=bool(config.get("mlp_bias", False)),
            qk_norm=family == "qwen3",
            sliding_windows=_sliding_windows(config, family, num_layers),
            rope=RopeConfig.from_hf(config, max_positions),
            dtype=_dtype(config),
            bos_token_id=config.get("bos_token_id"),
            eos_token_ids=token_ids(config.get("eos_token_id")),
        )


def token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    """Normalise an id field that may be absent, one id or several."""
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (value,)


def _required(config: Mapping[str, Any], name: str) -> int:
    if config.get(name) is None:
        raise UnsupportedModelError(f"config.json: {name} is missing")
    return int(config[name])


def _dtype(config: Mapping[str, Any]) -> torch.dtype:
    name = config.get("dtype") or config.get("torch_dtype") or "float32"
    if name not in _DTYPES:
        raise UnsupportedModelError(f"dtype: got {name!r}, expected one of {', '.join(_DTYPES)}")
    return _DTYPES[name]


def _sliding_windows(
    config: Mapping[str, Any], family: str, num_layers: int
) -> tuple[int | None, ...]:
    window = config.get("sliding_window")
    if family == "llama" or window is None:
        return (None,) * num_layers
    if family == "mistral":
        return (int(window),) * num_layers
    if not config.get("use_sliding_window", False):
        return (None,) * num_layers
    first = int(config.get("max_window_layers", num_layers))
    kinds = config.get("layer_types") or [
        "sliding_attention" if layer >= first else "full_attention" for layer in range(num_layers)
    ]
    return tuple(int(window) if kind == "sliding_attention" else None for kind in kinds)
