"""The model that bench_vllm.py has vLLM load: Llama-3.1-8B's shape in INT8, of random weights.

vLLM reads the config.json that is written here and makes dummy weights (`load_format="dummy"`);
`refill` and `set_scales` are then called on the model in its process (`LLM.apply_model`).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def write_config() -> str:
    """Write the model's config.json and return its folder."""
    folder = Path("/tmp/T/vllm_models/int8_L32")
    folder.mkdir(parents=True, exist_ok=True)
    eight_bits = {
        "num_bits": 8,
        "type": "int",
        "symmetric": True,
        "group_size": None,
        "block_structure": None,
        "actorder": None,
        "observer_kwargs": {},
    }
    weights = {**eight_bits, "strategy": "channel", "dynamic": False, "observer": "minmax"}
    inputs = {**eight_bits, "strategy": "token", "dynamic": True, "observer": None}
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": inputs,
        "output_activations": None,
    }
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 128000,
        "eos_token_id": [128001, 128008, 128009],
        "hidden_act": "silu",
        "hidden_size": 4096,
        "head_dim": 128,
        "initializer_range": 0.02,
        "intermediate_size": 14336,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-5,
        "rope_scaling": {
            "factor": 8.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.43.0",
        "use_cache": True,
        "vocab_size": 128256,
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": "int-quantized",
            "quantization_status": "compressed",
            "global_compression_ratio": None,
            "ignore": ["lm_head"],
            "kv_cache_scheme": None,
            "config_groups": {"group_0": group},
        },
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    return str(folder)


def set_scales(model: Any) -> list[str]:
    """Set the scales of the KV cache, which dummy weights leave random, to 1: the default."""
    import torch

    found = []
    for module in model.modules():
        for name in ("_k_scale", "_v_scale", "_q_scale", "_prob_scale"):
            scale = getattr(module, name, None)
            if isinstance(scale, torch.Tensor):
                if name == "_k_scale":
                    found.append((tuple(scale.shape), scale.dtype, float(scale.float().max())))
                scale.fill_(1.0)
                if hasattr(module, name + "_float"):
                    setattr(module, name + "_float", 1.0)
    return [f"{len(found)} layers had _k_scale, the first {found[:1]}"]


def refill(model: Any) -> list[str]:
    """Overwrite vLLM's dummy weights by random ones, and return how many there are of each kind."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "compat" / "vllm"))
    from vllm_weights import fill_model

    seen: dict[str, int] = {}
    for name, data in fill_model(model):
        kind = ".".join(part for part in name.split(".") if not part.isdigit())
        key = f"{kind} {tuple(data.shape)} {data.dtype}"
        seen[key] = seen.get(key, 0) + 1
    return [f"{count}x {key}" for key, count in seen.items()]
