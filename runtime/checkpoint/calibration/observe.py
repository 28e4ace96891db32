"""Observes what a model's linear layers are given, and its keys and values, over a text."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

import torch
from tqdm import tqdm

from ...models import (
    Decoder,
    DenseLinear,
    KVFormat,
    Linear,
    ModelConfig,
    PagedKVCache,
    compile_kernels,
    family_of,
)
from ...models.layout import DecoderLayout
from ...models.parts import LinearPart
from ...models.scoring import sequence_inputs
from ..files import open_regular
from ..format import StoredSchemeOf
from ..load import CheckpointLoader
from ..reader import CheckpointReader
from ..storage.base import Target
from ..tokenizer import load_tokenizer

_MAX_BYTES = 1 << 20  # of a text, of which the first tokens count
_MAX_TOKENS, _PIECE = 2048, 512
_LEAST_TOKENS = 64
_PAGE_SIZE = 16


@dataclass(frozen=True)
class Observed:
    """The largest magnitudes over a text, fp32 on the CPU.

    Args:
        inputs: [K] of each input column by the name of a layer's first module, of the layers' parts
            whose weights are plain, not of the head.
        cache: [layers, 2, heads_kv, dim] of keys after RoPE, as they are stored, and of values.
    """

    inputs: dict[str, torch.Tensor]
    cache: torch.Tensor


def read_tokens(text: str | os.PathLike[str], source: Path, vocab_size: int) -> list[int]:
    """Return the first tokens of a text file, by the tokenizer of a checkpoint.

    Raises:
        CheckpointError: when the file cannot be read or is no regular one, and for the tokenizer.
        ValueError: for a text that is too short or no UTF-8, or tokens beyond the vocabulary.
    """
    with open_regular(Path(text)) as file:
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


def observe(
    reader: CheckpointReader,
    config: ModelConfig,
    layout: DecoderLayout,
    scheme_of: StoredSchemeOf,
    tokens: list[int],
    *,
    device: torch.device | str = "cpu",
    progress: bool = False,
) -> Observed:
    """Run a text through a model, once, and return the largest magnitudes.

    The model is loaded in the dtype of its weights, and computes sequences of up to 512 tokens.

    Args:
        reader: of a checked checkpoint.
        config: of its model.
        layout: likewise.
        scheme_of: how its modules are stored.
        tokens: of the text.
        device: where the model runs.
        progress: show a progress bar, on a terminal only.
    """
    target = Target(torch.device(device), config.dtype, batch_invariant=True)
    loader = _ObservingLoader(reader, scheme_of, target, None)
    # RoPE whose angles depend on the longest sequence is that of a piece.
    piece = min(_PIECE, len(tokens), config.longest_context)
    model = family_of(config).load(config, layout, loader, max_context=piece)
    compile_kernels(model)
    cache = _run(model, tokens, progress)
    return Observed({name: layer.largest.cpu() for name, layer in loader.layers.items()}, cache)


@torch.inference_mode()
def _run(model: Decoder, tokens: list[int], progress: bool) -> torch.Tensor:
    """Compute a text; return the largest magnitudes of keys and values."""
    config, piece = model.config, model.max_context
    cache = PagedKVCache.for_model(
        config,
        num_pages=1 + -(-piece // _PAGE_SIZE),
        page_size=_PAGE_SIZE,
        device=model.device,
        l2_partitioned=False,
        kv_format=KVFormat(config.dtype),
    )
    shape = (config.num_layers, 2, config.num_kv_heads, config.head_dim)
    found = torch.zeros(shape, device=model.device)
    starts = range(0, len(tokens), piece)
    for start in tqdm(starts, desc="Calibrating", unit="piece", disable=None if progress else True):
        model.hidden(*sequence_inputs(cache, tokens[start : start + piece]), cache)
        cache.free(0)
        # Pages that this piece leaves alone hold what was measured before, or zeros.
        found = torch.maximum(found, cache.storage.abs().amax(dim=(2, 3)).float())
    return found.cpu()


@dataclass
class _ObservedLinear(DenseLinear):
    """A layer that notes what it is given."""

    largest: torch.Tensor = field(default_factory=lambda: torch.zeros(()))

    def __call__(self, x: torch.Tensor, n_active: torch.Tensor | None = None) -> torch.Tensor:
        found = x.float().abs().amax(0)
        self.largest = torch.maximum(self.largest.to(found.device), found)
        return super().__call__(x, n_active)


@dataclass(frozen=True)
class _ObservingLoader(CheckpointLoader):
    """Reads parts of a checkpoint; layers whose weights are plain note their inputs."""

    layers: dict[str, _ObservedLinear] = field(default_factory=dict)

    def linear(self, part: LinearPart) -> Linear:
        plain = super().linear(part)
        if not isinstance(plain, DenseLinear):
            return plain
        layer = _ObservedLinear(plain.weight, plain.bias, plain.out_dtype)
        self.layers[part.modules[0].name] = layer
        return layer
