"""What a step of a model with experts reads and multiplies, and its kernels by name."""

from __future__ import annotations

import pytest
import torch

from ostinato.bench.shapes import SHAPES
from ostinato.bench.step.roofline import Roofline, kernel_rooflines, step_roofline
from ostinato.bench.step.work import expected_experts, step_flops, weight_bytes
from ostinato.bench.weights import random_decoder
from ostinato.models import read_config

CONFIG = read_config(SHAPES["tiny-moe"])
CPU = torch.device("cpu")
# Of a layer: qkv [128, 64], o [64, 64], router [8, 64]; an expert: [96, 64] and [64, 48].
ATTENTION, ROUTER, EXPERT, HEAD = 128 * 64 + 64 * 64, 8 * 64, 96 * 64 + 64 * 48, 512 * 64


def test_a_token_is_multiplied_by_its_own_experts() -> None:
    model = random_decoder(CONFIG, "bf16", CPU, max_context=8)
    of_layer = ATTENTION + ROUTER + 2 * EXPERT + 2 * 7 * 64  # with scores and sums of attention
    assert step_flops(model, batch=3, context=7) == 2 * 3 * (2 * of_layer + HEAD)


@pytest.mark.parametrize(("precision", "size"), [("int8", 1), ("bf16", 2)])
def test_a_step_reads_experts_that_have_tokens(precision: str, size: int) -> None:
    model = random_decoder(CONFIG, precision, CPU, max_context=8)
    rows = 128 + 64 + 8 * (96 + 64)
    every = 2 * (ATTENTION * size + 2 * ROUTER + 8 * EXPERT * size) + 2 * HEAD
    every += 2 * 4 * rows if precision == "int8" else 0
    every += 2 * 64 * (2 * 2 + 1) + 2 * 2 * 2 * 16  # norms, those of heads among them
    assert weight_bytes(model, batch=10_000) == every
    scales = 8 * 4 * (96 + 64) if precision == "int8" else 0
    of_experts = 2 * (8 * EXPERT * size + scales)
    assert weight_bytes(model, batch=1) == every - of_experts * 6 // 8
    assert expected_experts(CONFIG.experts, 1) == pytest.approx(2)
    assert expected_experts(CONFIG.experts, 2) == pytest.approx(2 + 6 * 2 / 8)


def test_the_roofline_counts_every_product() -> None:
    model = random_decoder(CONFIG, "int8", CPU, max_context=8)
    roofline = Roofline(1e9, {1: 1e15, 2: 1e15})
    kernels = kernel_rooflines(model, 1, 7, roofline)
    counts = {name: count for name, (count, _) in kernels.items()}
    assert counts == {
        **dict.fromkeys(("qkv", "o", "router", "experts_gate_up", "experts_down"), 2),
        "lm_head": 1,
        "attention": 2,
    }
    assert kernels["experts_gate_up"][1].num_bytes == pytest.approx(2 * 96 * 64)
    seconds = sum(count * time.num_bytes for count, time in kernels.values()) / 1e9
    assert step_roofline(kernels) == pytest.approx(seconds)
