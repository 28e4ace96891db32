"""Finds static scales of an 8-bit KV cache, by the keys and values that a text has in a model."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from tqdm import tqdm

from ..models import Decoder, KVFormat, KVScales, PagedKVCache
from ..models.scoring import sequence_inputs
from .config import load_config
from .errors import CheckpointError
from .files import read_text
from .load import load_model
from .tokenizer import load_tokenizer

_MAX_TEXT_BYTES = 64 << 20
_WINDOW = 2048  # tokens that are computed at once, and that attend to each other
_PAGE_SIZE = 16
# What the largest magnitude is divided by, as in compressed-tensors: half of the grid's range.
_GRID_MAX = {torch.int8: 127.5, torch.float8_e4m3fn: 448.0}


def calibrate_kv_cache(
    folder: Path,
    text: str | os.PathLike[str],
    dtype: torch.dtype,
    *,
    device: torch.device | str = "cpu",
    progress: bool = True,
) -> KVScales:
    """Return scales by which no key and no value of a text saturates.

    The text is computed in pieces of up to 2048 tokens. Keys are measured as they are stored: after
    RoPE.

    Args:
        folder: of the checkpoint, with a tokenizer.
        text: file in UTF-8, of up to 64 MiB.
        dtype: of the cache, int8 or float8_e4m3fn.
        device: where the model runs.
        progress: show a progress bar, on a terminal only.

    Returns:
        scales [num_layers] of keys and of values.

    Raises:
        CheckpointError: naming the file, for a checkpoint that `load_model` refuses, one without a
            tokenizer or with one of another vocabulary, and a text that is missing, too large,
            without tokens, or one that makes keys or values NaN or infinite.
    """
    file = Path(text)
    tokenizer = load_tokenizer(folder)
    tokens = tokenizer.encode(read_text(file, _MAX_TEXT_BYTES)).ids
    if not tokens:
        raise CheckpointError(f"{file}: holds no tokens, expected a text to calibrate by")
    # RoPE whose angles depend on the longest sequence is that of a piece.
    window = min(_WINDOW, load_config(folder).longest_context)
    model = load_model(folder, device=device, max_context=window)
    vocabulary = model.config.vocab_size
    if max(tokens) >= vocabulary:
        raise CheckpointError(
            f"{folder}: the tokenizer gives token {max(tokens)}, expected less than the model's "
            f"vocabulary of {vocabulary}"
        )
    largest = _largest(model, tokens, progress)
    for layer, of_layer in enumerate(largest.tolist()):
        for name, value in zip(("keys", "values"), of_layer, strict=True):
            if not 0 <= value < float("inf"):
                raise CheckpointError(
                    f"{file}: {name} of layer {layer} are NaN or infinite, expected numbers to "
                    "calibrate by"
                )
    scales = largest / _GRID_MAX[dtype]
    scales = scales.where(scales > torch.finfo(torch.float32).tiny, 1.0)  # of nothing but zeros
    return KVScales(dtype, scales[:, 0], scales[:, 1])


@torch.inference_mode()
def _largest(model: Decoder, tokens: list[int], progress: bool) -> torch.Tensor:
    """Return the largest magnitude of keys and values, [layers, 2] fp32 on the CPU."""
    window = min(model.max_context, len(tokens))
    cache = PagedKVCache.for_model(
        model.config,
        num_pages=1 + -(-window // _PAGE_SIZE),
        page_size=_PAGE_SIZE,
        device=model.device,
        l2_partitioned=False,
        kv_format=KVFormat(model.config.dtype),
    )
    found = torch.zeros(model.config.num_layers, 2, device=model.device)
    starts = range(0, len(tokens), window)
    for start in tqdm(starts, desc="Calibrating", unit="piece", disable=None if progress else True):
        model.hidden(*sequence_inputs(cache, tokens[start : start + window]), cache)
        cache.free(0)
        # Pages that this piece leaves alone hold what was measured before, or zeros.
        found = torch.maximum(found, cache.storage.abs().amax(dim=(2, 3, 4, 5)).float())
    return found.cpu()
