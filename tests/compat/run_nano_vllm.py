"""Runs nano-vllm on our attention: with CUDA graphs it must give the tokens it gives without.

    python tests/compat/run_nano_vllm.py CHECKOUT [--out docs/results/h100/nano_vllm.txt]

CHECKOUT is a clone of https://github.com/GeeeekExplorer/nano-vllm. Its `flash_attn` is
`ostinato.compat.flash_attn`; its model, scheduler, captures and sampler are its own. It warms up on
the current stream and captures on another, as most code does. The model is a random Qwen3 of six
layers in bfloat16, whose largest logits are often equal: its sampler then draws one, so that the
generators are seeded before each run.
"""

from __future__ import annotations

import argparse
import atexit
import gc
import sys
import tempfile
import types
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from ostinato.bench.report import Report
from ostinato.compat import flash_attn

TOKENIZER = Path(__file__).parents[2] / "examples/tiny-llama/tokenizer.json"
LENGTHS = (5, 17, 64, 200, 300, 700, 33, 1)  # of the prompts
TOKENS = 48


def save_model(folder: str) -> None:
    torch.manual_seed(0)
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(TOKENIZER), eos_token="<eos>")
    tokenizer.add_special_tokens({"eos_token": "<eos>"})
    config = Qwen3Config(
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=6,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=4096,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        eos_token_id=len(tokenizer) - 1,
    )
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0, 0.05)
        model.lm_head.weight.normal_(0, 0.2)
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def generate(folder: str, prompts: list[list[int]], *, eager: bool) -> list[list[int]]:
    from nanovllm import LLM, SamplingParams

    llm = LLM(
        folder,
        enforce_eager=eager,
        max_model_len=2048,
        max_num_seqs=64,
        gpu_memory_utilization=0.5,
    )
    torch.manual_seed(1)
    params = SamplingParams(temperature=1e-6, max_tokens=TOKENS, ignore_eos=True)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    atexit.unregister(llm.exit)  # which may be called once
    llm.exit()
    del llm
    gc.collect()
    torch.cuda.empty_cache()  # the next one looks how much is free
    return [output["token_ids"] for output in outputs]


def common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    sys.path.insert(0, str(options.checkout))
    module = types.ModuleType("flash_attn")
    module.flash_attn_varlen_func = flash_attn.flash_attn_varlen_func
    module.flash_attn_with_kvcache = flash_attn.flash_attn_with_kvcache
    sys.modules["flash_attn"] = module
    random = torch.Generator().manual_seed(1)
    prompts = [torch.randint(0, 500, (n,), generator=random).tolist() for n in LENGTHS]
    with tempfile.TemporaryDirectory() as folder:
        save_model(folder)
        eager = generate(folder, prompts, eager=True)
        graphs = generate(folder, prompts, eager=False)
    equal = [common(a, b) for a, b in zip(eager, graphs, strict=True)]
    report = Report.for_device(torch.device("cuda"))
    lines = [
        f"{report.gpu}, commit {report.commit}",
        ", ".join(f"{name} {version}" for name, version in report.versions.items()),
        f"prompts of {', '.join(map(str, LENGTHS))} tokens, {TOKENS} new tokens each",
        f"tokens with graphs before the first that eager has not: {', '.join(map(str, equal))}",
        *(f"{n:4} {' '.join(map(str, out))}" for n, out in zip(LENGTHS, graphs, strict=True)),
    ]
    print("\n".join(lines))
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text("\n".join(lines) + "\n")
    if equal != [TOKENS] * len(LENGTHS):
        sys.exit("the tokens differ")


if __name__ == "__main__":
    main()
