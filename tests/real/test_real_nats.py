"""Nats a token of real models over a text: quantised weights beside those of 16 bits.

A text's own nats a token say little of weights: over 3000 tokens of SmolLM2 the rise by INT8 has a
standard error of .15%. What is held to limits is its expectation, were the text written by the
16-bit model: the mean over positions of KL(p of 16 bits || p of 8 bits), whose error is .04%.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
from measure_kv_cache import expected_rise
from real_models import SCORED, RealModel, Record, topics_text
from transformers import AutoTokenizer

from ostinato.checkpoint import load_model
from ostinato.models import sequence_logits

pytestmark = [pytest.mark.real, pytest.mark.timeout(3600)]

PIECE = 256
SCHEMES = ("int8", "int8-asymmetric", "int8-calibrated", "int8-asymmetric-calibrated", "fp8")


def pieces(real: RealModel) -> tuple[list[int], list[list[int]]]:
    """Return the tokens that the model wants first, and those of the text, piece by piece."""
    tokenizer = AutoTokenizer.from_pretrained(real.folder())
    tokens = tokenizer(topics_text(SCORED), add_special_tokens=False).input_ids[: real.tokens]
    assert len(tokens) == real.tokens
    return tokenizer("").input_ids, [tokens[at : at + PIECE] for at in range(0, len(tokens), PIECE)]


def predictions(real: RealModel, folder: Path, device: torch.device) -> Iterator[torch.Tensor]:
    """Yield log p after each token but the last of each piece, fp32."""
    # On a CPU fp32 is as fast as bf16, and no rounding of activations blurs what weights cost.
    dtype = torch.float32 if device.type == "cpu" else None
    model = load_model(folder, device=device, dtype=dtype, max_context=2 * PIECE)
    first, texts = pieces(real)
    for text in texts:
        yield sequence_logits(model, [*first, *text])[len(first) : -1].log_softmax(-1)


@cache
def of_16_bits(real: RealModel, device: torch.device) -> list[torch.Tensor]:
    return list(predictions(real, real.folder(), device))


def nats(log_p: torch.Tensor, text: list[int]) -> torch.Tensor:
    """Return the nats of each token but the first."""
    return -log_p.gather(1, torch.tensor(text[1:], device=log_p.device).unsqueeze(1)).squeeze(1)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_quantized_weights_cost_few_nats(
    scheme: str,
    real: RealModel,
    stored: Callable[[RealModel, str], Path],
    device: torch.device,
    record: Record,
) -> None:
    whole, found, losses = [], [], []
    for exact, log_p, text in zip(
        of_16_bits(real, device),
        predictions(real, stored(real, scheme), device),
        pieces(real)[1],
        strict=True,
    ):
        whole.append(nats(exact, text))
        found.append(nats(log_p, text))
        losses.append((exact.exp() * (exact - log_p)).sum(1))
    before = float(torch.cat(whole).mean())
    assert 0.5 < before < math.log(1000), "the model knows the language"
    rise, error = expected_rise(before, torch.cat(losses))
    record(
        device,
        real,
        measured="nats a token",
        scheme=scheme,
        bf16=round(before, 4),
        quantized=round(float(torch.cat(found).mean()), 4),
        expected_rise=round(rise, 5),
        standard_error=round(error, 5),
        limit=real.limits[scheme],
    )
    assert rise <= real.limits[scheme]
