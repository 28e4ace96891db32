"""Small random models and tokenizers of bytes for tests that need no checkpoint."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from ostinato.models import DenseLinear, KVScales, ModelConfig, RopeConfig, W8A8Linear
from ostinato.models.families.llama import DecoderLayer, Llama
from ostinato.models.norms import Norm, NormConfig

CONFIG = ModelConfig(
    family="llama",
    vocab_size=257,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    norm=NormConfig(1e-5),
    max_position_embeddings=128,
    tie_word_embeddings=False,
    qkv_bias=False,
    o_bias=False,
    mlp_bias=False,
    qk_norm=False,
    sliding_windows=(None, None),
    ropes=(RopeConfig(),) * 2,
    dtype=torch.float32,
    bos_token_id=None,
    eos_token_ids=(256,),
)

# Options of an engine, by the kind of its KV cache; what is "static" wants `kv_scales` of a model.
KV_CACHES: dict[str, dict[str, Any]] = {
    "model": {},
    "fp8": {"kv_cache_dtype": "fp8"},
    "fp8_static": {"kv_cache_dtype": "fp8", "kv_scales": "static"},
    "int8": {"kv_cache_dtype": "int8", "kv_scales": "token"},
    "int8_static": {"kv_cache_dtype": "int8", "kv_scales": "static"},
}


def tiny_llama(
    device: torch.device | str = "cpu",
    scheme: str = "plain",
    *,
    cache: str = "model",
    **overrides: object,
) -> Llama:
    """Return a random decoder of `CONFIG` with `overrides`; scheme is plain, int8 or fp8.

    The same weights come out on every device. It is made for a KV cache of one of `KV_CACHES`.
    """
    made = _tiny_llama(device, scheme, **overrides)
    if cache == "int8_static":
        k = torch.tensor([[0.03, 0.04], [0.05, 0.02]])  # by layer and head
        made.kv_scales = KVScales(torch.int8, k, torch.tensor([0.03, 0.02]))
    return made


def _tiny_llama(device: torch.device | str, scheme: str, **overrides: object) -> Llama:
    config = replace(CONFIG, **overrides)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> torch.Tensor:
        # Large enough that logits differ clearly and greedy text does not settle on one token.
        return torch.randn(shape, generator=generator) * (1.5 / shape[-1] ** 0.5)

    def linear(rows: int, columns: int) -> DenseLinear:
        weight = random(rows, columns)
        if scheme == "plain":
            return DenseLinear(weight.to(device, config.dtype))
        top, dtype = (127.0, torch.int8) if scheme == "int8" else (448.0, torch.float8_e4m3fn)
        scale = weight.abs().amax(1) / top
        scaled = weight / scale[:, None]
        stored = (scaled.round() if scheme == "int8" else scaled).to(dtype)
        return W8A8Linear(stored.to(device), scale.to(device), config.dtype)

    def norm(size: int) -> Norm:
        return Norm((1 + random(size) * 0.1).to(device, config.dtype), config.norm.eps)

    hidden, head_dim = config.hidden_size, config.head_dim
    layers = [
        DecoderLayer(
            input_norm=norm(hidden),
            qkv=linear(config.q_size + 2 * config.kv_size, hidden),
            o=linear(hidden, config.q_size),
            post_attention_norm=norm(hidden),
            gate_up=linear(2 * config.intermediate_size, hidden),
            down=linear(hidden, config.intermediate_size),
            q_norm=norm(head_dim) if config.qk_norm else None,
            k_norm=norm(head_dim) if config.qk_norm else None,
        )
        for _ in range(config.num_layers)
    ]
    embedding = random(config.vocab_size, hidden).to(device, config.dtype)
    final_norm, head = norm(hidden), random(config.vocab_size, hidden).to(device, config.dtype)
    lm_head = DenseLinear(head, out_dtype=torch.float32)
    return Llama(config, embedding, layers, final_norm, lm_head)


def byte_tokenizer() -> Tokenizer:
    """Return a tokenizer with one id per byte and 256 for the end of the text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: index for index, letter in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    return tokenizer


def byte_fallback_tokenizer() -> Tokenizer:
    """Return a tokenizer as Llama 2's: words with a mark for the space before, and bytes."""
    pieces = ["<unk>", "\u2581the", "\u2581cat", "s", *(f"<0x{i:02X}>" for i in range(256))]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer
