"""Nats a token of real models over a fixed text: quantised weights beside those of 16 bits."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from real_models import SCORED, RealModel, Record, topics_text
from transformers import AutoTokenizer

from ostinato.checkpoint import load_model
from ostinato.models import sequence_logits

pytestmark = [pytest.mark.real, pytest.mark.timeout(3600)]

PIECE, PIECES = 750, 4


def pieces(folder: Path) -> tuple[list[int], list[list[int]]]:
    """Return the tokens that the model wants first, and those of the text, piece by piece."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokens = tokenizer(topics_text(SCORED), add_special_tokens=False).input_ids[: PIECE * PIECES]
    return tokenizer("").input_ids, [tokens[at : at + PIECE] for at in range(0, len(tokens), PIECE)]


@cache
def nats(folder: Path, device: torch.device) -> float:
    """Return the mean of -log p of each token after the first of its piece."""
    model = load_model(folder, device=device, max_context=2 * PIECE)
    first, texts = pieces(folder)
    total, count = 0.0, 0
    for text in texts:
        logits = sequence_logits(model, [*first, *text])[len(first) : -1]
        wanted = torch.tensor(text[1:], device=logits.device)
        total += float(torch.nn.functional.cross_entropy(logits, wanted, reduction="sum"))
        count += len(wanted)
    return total / count


@pytest.mark.parametrize("scheme", ["int8", "int8-calibrated", "fp8"])
def test_quantized_weights_cost_few_nats(
    scheme: str,
    real: RealModel,
    stored: Callable[[RealModel, str], Path],
    device: torch.device,
    record: Record,
) -> None:
    whole, quantized = (nats(stored(real, kind), device) for kind in ("bf16", scheme))
    assert 0.5 < whole < math.log(1000), "the model knows the language"
    rise = quantized / whole - 1
    record(
        device,
        real,
        measured="nats a token",
        scheme=scheme,
        bf16=round(whole, 4),
        quantized=round(quantized, 4),
        rise=round(rise, 5),
        limit=real.limits[scheme],
    )
    assert rise <= real.limits[scheme]
