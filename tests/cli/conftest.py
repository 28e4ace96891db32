"""A checkpoint folder for the commands to work on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tiny import byte_tokenizer

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 32, 48, 4, 2, 8, 257

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "float32",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    # Long enough for a generation that a test has to interrupt.
    "max_position_embeddings": 65536,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "eos_token_id": 256,
}


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a one-layer fp32 Llama with random weights and a byte tokenizer."""
    folder = tmp_path_factory.mktemp("checkpoints") / "random-llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    save_file(_random_weights(), folder / "model.safetensors")
    return folder


def _random_weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = {
        "model.embed_tokens": (VOCAB, HIDDEN),
        "model.layers.0.self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN),
        "model.layers.0.self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
        "model.layers.0.self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
        "model.layers.0.self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
        "model.layers.0.mlp.gate_proj": (INTERMEDIATE, HIDDEN),
        "model.layers.0.mlp.up_proj": (INTERMEDIATE, HIDDEN),
        "model.layers.0.mlp.down_proj": (HIDDEN, INTERMEDIATE),
        "model.layers.0.input_layernorm": (HIDDEN,),
        "model.layers.0.post_attention_layernorm": (HIDDEN,),
        "model.norm": (HIDDEN,),
    }
    return {
        f"{name}.weight": (
            torch.ones(shape)
            if len(shape) == 1
            else torch.randn(shape, generator=generator) * (1.5 / shape[-1] ** 0.5)
        )
        for name, shape in shapes.items()
    }
