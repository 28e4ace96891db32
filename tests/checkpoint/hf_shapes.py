"""What the configurations of small random models have in common."""

from __future__ import annotations

from typing import Any

SHAPE: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}

TIED = {**SHAPE, "tie_word_embeddings": True}
# Within the vocabulary, unlike the defaults of some families.
IDS: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}
SLIDING_FIRST = ["sliding_attention", "full_attention"]

# Longer than every window and every original context below, so that their effects show.
TOKENS = [(7 * index * index + 3) % SHAPE["vocab_size"] for index in range(40)]


def rope(kind: str, **fields: Any) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": 10000.0, **fields}
