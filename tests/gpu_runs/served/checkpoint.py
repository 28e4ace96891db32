#!/usr/bin/env python3
"""Writes a checkpoint of random W8A8 weights of a Llama shape, which both servers load.

    python tests/gpu_runs/served/checkpoint.py FOLDER [--shape llama-3.1-8b] [--dtype int8|fp8] \\
        [--device cuda]

The format is that of compressed-tensors: symmetric, weights with a scale per channel, activations
with one per token; lm_head stays bf16. The tokenizer's token n is the word "n". Activations stay of
order one. run.py starts this; it needs 9.1 GB of room for Llama-3.1-8B.
"""

import argparse
import json
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from ostinato.bench.engine import number_tokenizer
from ostinato.bench.shapes import SHAPES
from ostinato.checkpoint.writer import CheckpointWriter, PlannedTensor

KINDS = {
    "int8": (torch.int8, "int", "int-quantized", 127.0),
    "fp8": (torch.float8_e4m3fn, "float", "float-quantized", 448.0),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape", default="llama-3.1-8b", choices=SHAPES)
    parser.add_argument("--dtype", default="int8", choices=KINDS)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--vocab", type=int, help="for trials: fewer tokens than the shape has")
    args = parser.parse_args()
    started = time.perf_counter()
    shape = dict(SHAPES[args.shape])
    assert shape["model_type"] == "llama", "names of tensors are those of Llama"
    if args.vocab:
        shape["vocab_size"] = args.vocab
    stored, kind, form, most = KINDS[args.dtype]
    hidden, inner, vocab = (shape[k] for k in ("hidden_size", "intermediate_size", "vocab_size"))
    q, kv = (shape[k] * shape["head_dim"] for k in ("num_attention_heads", "num_key_value_heads"))
    linears = {
        "self_attn.q_proj": (q, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, q),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    plan: list[PlannedTensor] = []
    layers = range(shape["num_hidden_layers"])
    for layer in layers:
        for name, (rows, columns) in linears.items():
            at = f"model.layers.{layer}.{name}"
            plan.append(PlannedTensor(f"{at}.weight", stored, (rows, columns)))
            plan.append(PlannedTensor(f"{at}.weight_scale", torch.bfloat16, (rows, 1)))
        for name in ("input_layernorm", "post_attention_layernorm"):
            plan.append(
                PlannedTensor(f"model.layers.{layer}.{name}.weight", torch.bfloat16, (hidden,))
            )
    plan.append(PlannedTensor("model.norm.weight", torch.bfloat16, (hidden,)))
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        plan.append(PlannedTensor(name, torch.bfloat16, (vocab, hidden)))
    folder: Path = args.folder
    folder.mkdir(parents=True, exist_ok=True)
    writer = CheckpointWriter(folder, plan, 512 << 20)
    generator = torch.Generator(args.device).manual_seed(0)

    def normal(rows: int, columns: int, std: float) -> torch.Tensor:
        weight = torch.empty(rows, columns, dtype=torch.bfloat16, device=args.device)
        return weight.normal_(std=std, generator=generator)

    def draw(tensor: PlannedTensor) -> list[tuple[str, torch.Tensor]]:
        """Return what is written with this one; scales come with their weights."""
        if tensor.name.endswith("norm.weight"):
            return [(tensor.name, torch.ones(tensor.shape, dtype=torch.bfloat16))]
        rows, columns = tensor.shape
        weight = normal(rows, columns, 1.0 if "embed" in tensor.name else columns**-0.5)
        if tensor.dtype == torch.bfloat16:
            return [(tensor.name, weight.cpu())]
        scale = (weight.abs().amax(1, keepdim=True).float() / most).clamp(min=1e-6).bfloat16()
        values = (weight.float() / scale.float()).clamp(-most, most)
        values = values.round().to(stored) if stored == torch.int8 else values.to(stored)
        return [(tensor.name, values.cpu()), (f"{tensor.name}_scale", scale.cpu())]

    with ThreadPoolExecutor(8) as pool:
        jobs = []
        for tensor in plan:
            if not tensor.name.endswith("_scale"):
                jobs += [pool.submit(writer.write, name, data) for name, data in draw(tensor)]
                while sum(not job.done() for job in jobs[-64:]) > 32:
                    time.sleep(0.001)  # or all of it would be held in memory twice
        for job in jobs:
            job.result()
    scheme = {"num_bits": 8, "type": kind, "symmetric": True, "group_size": None}
    config = {
        **shape,
        "architectures": ["LlamaForCausalLM"],
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": False,
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": form,
            "quantization_status": "compressed",
            "ignore": ["lm_head"],
            "kv_cache_scheme": None,
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": {**scheme, "strategy": "channel", "dynamic": False},
                    "input_activations": {**scheme, "strategy": "token", "dynamic": True},
                    "output_activations": None,
                }
            },
        },
    }
    del config["dtype"]
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    number_tokenizer(vocab).save(str(folder / "tokenizer.json"), pretty=False)
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "unk_token": "0",
                "model_max_length": 131072,
            }
        )
    )
    size = sum(file.stat().st_size for file in folder.iterdir())
    free = shutil.disk_usage(folder).free
    seconds = time.perf_counter() - started
    print(f"{folder}: {size / 1e9:.2f} GB in {seconds:.1f} s, {free >> 30} GiB free")


if __name__ == "__main__":
    main()
