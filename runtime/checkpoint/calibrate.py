"""Observes the inputs of a model's linear layers over a text."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ..models import DenseLinear, Linear, ModelConfig, family_of, sequence_logits
from ..models.parts import DecoderLayout, LinearPart
from .load import CheckpointLoader
from .reader import CheckpointReader
from .storage.base import Target
from .storage.dense import DENSE, unquantized
from .tokenizer import load_tokenizer

_MAX_BYTES = 1 << 20  # of a text, of which the first tokens count
_MAX_TOKENS, _PIECE = 2048, 512
_LEAST_TOKENS = 64


def read_tokens(text: str | os.PathLike[str], source: Path, vocab_size: int) -> list[int]:
    """Return the first tokens of a text file, by the tokenizer of a checkpoint.

    Raises:
        OSError: when the file cannot be read.
        CheckpointError: for the tokenizer.
        ValueError: for a text that is too short or no UTF-8, or tokens beyond the vocabulary.
    """
    with Path(text).open("rb") as file:
        start = file.read(_MAX_BYTES)
    try:
        # A character may be cut at the end of what is read.
        decoded = start.decode("utf-8", errors="strict" if len(start) < _MAX_BYTES else "ignore")
    except UnicodeDecodeError as error:
        raise ValueError(f"calibrate: {text}: no UTF-8: {error}") from error
    tokens: list[int] = load_tokenizer(source).encode(decoded).ids[:_MAX_TOKENS]
    if len(tokens) < _LEAST_TOKENS:
        raise ValueError(
            f"calibrate: got {len(tokens)} tokens in {text}, expected at least {_LEAST_TOKENS}"
        )
    if max(tokens) >= vocab_size:
        raise ValueError(
            f"calibrate: got token {max(tokens)} of tokenizer.json, expected less than the "
            f"model's vocab_size {vocab_size}"
        )
    return tokens


def largest_inputs(
    reader: CheckpointReader, config: ModelConfig, layout: DecoderLayout, tokens: list[int]
) -> dict[str, torch.Tensor]:
    """Return the largest magnitude of each input column of every linear layer over a text.

    The model is loaded on the CPU, in the dtype of its weights, and computes 512 tokens at a time.

    Args:
        reader: of a checked plain checkpoint.
        config: of its model.
        layout: likewise.
        tokens: of the text.

    Returns:
        [K] fp32 by the name of a layer's first module; of the layers' parts, not of the head.
    """
    target = Target(torch.device("cpu"), config.dtype, batch_invariant=True)
    loader = _ObservingLoader(reader, unquantized, target, None)
    piece = min(_PIECE, config.context(None))
    model = family_of(config).load(config, layout, loader, max_context=piece)
    for start in range(0, len(tokens), piece):
        sequence_logits(model, tokens[start : start + piece])
    return {name: layer.largest for name, layer in loader.layers.items()}


@dataclass
class _ObservedLinear(DenseLinear):
    """A layer that notes what it is given."""

    largest: torch.Tensor = field(default_factory=lambda: torch.zeros(()))

    def __call__(self, x: torch.Tensor, n_active: torch.Tensor | None = None) -> torch.Tensor:
        self.largest = torch.maximum(self.largest, x.float().abs().amax(0))
        return super().__call__(x, n_active)


@dataclass(frozen=True)
class _ObservingLoader(CheckpointLoader):
    """Reads parts of a plain checkpoint; layers note their inputs."""

    layers: dict[str, _ObservedLinear] = field(default_factory=dict)

    def linear(self, part: LinearPart) -> Linear:
        plain = DENSE.build(self.reader, part.modules, self.target)
        layer = _ObservedLinear(plain.weight, plain.bias, plain.out_dtype)
        self.layers[part.modules[0].name] = layer
        return layer
