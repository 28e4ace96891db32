"""Bits per byte of checkpoints on the held-back documentation topics: what quantising costs.

    python examples/evaluate_tiny.py bf16=DIR int8=DIR fp8=DIR --json docs/results/tiny-llama.json

Every topic is cut into windows of the model's context; each token but a window's first is
predicted from those before it in the window, and the bits are divided by the bytes of the text
predicted. Python's documentation differs between versions: the result names the corpus's hash.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from tiny_corpus import END_OF_TEXT, sha256_of, split_corpus
from tokenizers import Tokenizer

from ostinato.bench.report import Report
from ostinato.checkpoint import load_model, load_tokenizer
from ostinato.models import Decoder, sequence_logits


@dataclass(frozen=True)
class QualityRow:
    """How well one checkpoint predicts the text; `loss` is against the first checkpoint's."""

    section: str
    case: str
    impl: str
    bits_per_byte: float
    loss: float


def bits_per_byte(model: Decoder, tokenizer: Tokenizer, documents: list[str]) -> float:
    """Return the bits the model needs for a byte of `documents`, on average."""
    bits, size = 0.0, 0
    for document in documents:
        tokens = tokenizer.encode(END_OF_TEXT + document, add_special_tokens=False).ids
        for start in range(0, len(tokens) - 1, model.max_context):
            window = tokens[start : start + model.max_context + 1]
            logits = sequence_logits(model, window[:-1])
            targets = torch.tensor(window[1:], device=logits.device)
            loss = torch.nn.functional.cross_entropy(logits, targets, reduction="sum")
            bits += float(loss) / math.log(2)
        size += len(document.encode())
    return bits / size


def main() -> None:
    """Evaluate the named checkpoints and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("checkpoints", nargs="+", metavar="NAME=DIR")
    parser.add_argument("--json", type=Path, help="where to write the result")
    args = parser.parse_args()

    held_out = split_corpus()[1]
    documents = [document for document in held_out.split(END_OF_TEXT) if document]
    case = f"tiny-llama held-out text, sha256 {sha256_of(held_out)[:16]}"
    report = Report.for_device(torch.device("cpu"))
    first = None
    for name, _, folder in (argument.partition("=") for argument in args.checkpoints):
        bits = bits_per_byte(load_model(folder), load_tokenizer(folder), documents)
        first = bits if first is None else first
        row = QualityRow("quality", case, name, round(bits, 5), round(bits / first - 1, 5))
        report.rows.append(row)
        print(f"{name:8s} {bits:.4f} bits per byte, {row.loss:+.2%}")
    if args.json:
        report.write(args.json)


if __name__ == "__main__":
    main()
