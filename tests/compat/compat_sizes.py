"""What small models of transformers have in common."""

from __future__ import annotations

from typing import Any

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
# With the heads that they would have anyway, for classes that would choose another size.
TWO_LAYERS: dict[str, Any] = {**SIZES, "num_hidden_layers": 2, "head_dim": 16}
