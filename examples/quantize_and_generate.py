"""Quantise a 16-bit checkpoint to W8A8 and compare the texts of both.

python examples/quantize_and_generate.py SRC DST [--scheme fp8]    # folders; DST is made
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from ostinato.checkpoint import load_model, load_tokenizer, quantize_checkpoint
from ostinato.engine import Engine, SamplingParams

PROMPTS = ("A list display is", "The import statement")
MAX_CONTEXT = 128


def texts(folder: Path) -> list[str]:
    """Return the greedy texts of a checkpoint."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = load_model(folder, device=device, max_context=MAX_CONTEXT)
    engine = Engine(model, load_tokenizer(folder), max_batch=len(PROMPTS), max_context=MAX_CONTEXT)
    engine.capture(progress=False)
    completions = engine.generate(PROMPTS, SamplingParams(max_tokens=16))
    engine.close()
    return [completion.text for completion in completions]


def main() -> None:
    """Quantise, generate with both checkpoints, and print their texts and sizes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--scheme", choices=["int8", "fp8"], default="int8")
    arguments = parser.parse_args()
    quantize_checkpoint(arguments.source, arguments.target, scheme=arguments.scheme)
    for folder in (arguments.source, arguments.target):
        size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        print(f"{folder.name}: {size / 1e6:.1f} MB of weights")
        for prompt, text in zip(PROMPTS, texts(folder), strict=True):
            print(f"  {prompt}{text!r}")


if __name__ == "__main__":
    main()
