"""Text from a checkpoint, through the Python API: load, capture once, then stream and generate.

python examples/generate.py [MODEL]     # folder of a Hugging Face checkpoint; default: tiny-llama
"""

import argparse
from pathlib import Path

import torch

from ostinato.checkpoint import load_model, load_tokenizer
from ostinato.engine import Engine, SamplingParams

PROMPTS = ("The import statement", "A list display is", "If an exception occurs in the try clause")
MAX_BATCH = len(PROMPTS)
MAX_CONTEXT = 128


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = Path(__file__).parent / "tiny-llama"
    parser.add_argument("model", nargs="?", type=Path, default=default)
    folder = parser.parse_args().model

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = load_model(folder, device=device, max_context=MAX_CONTEXT)
    engine = Engine(model, load_tokenizer(folder), max_batch=MAX_BATCH, max_context=MAX_CONTEXT)
    print(engine.capture(), end="\n\n")

    # Token by token. Closing the iterator early would cancel the request.
    print(PROMPTS[0], end="", flush=True)
    for event in engine.stream(PROMPTS[:1], SamplingParams(max_tokens=48)):
        print(event.text, end="", flush=True)
    print()

    # Many at once: a text does not depend on those that are served beside it.
    sampled = SamplingParams(max_tokens=48, temperature=0.8, top_p=0.95, seed=1, stop=("\n\n",))
    for prompt, done in zip(PROMPTS, engine.generate(PROMPTS, sampled), strict=True):
        print(f"\n{prompt}{done.text}  [{len(done.token_ids)} tokens, {done.finish_reason.value}]")
    engine.close()


if __name__ == "__main__":
    main()
