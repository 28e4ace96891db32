"""`bench moe`: a block from normalised tokens to the sum over their experts, in one graph."""

from __future__ import annotations

from typing import Any

import torch

from ...ops.common.sizes import ceil_div
from ...ops.linear.quantize_cuda import GROUP
from ..harness.benchmark import Benchmark, one_layout_at_a_time
from ..harness.summary import Summary
from ..step.roofline import roofline_of
from .cases import Case
from .check import CHECK
from .impls import PEERS, RIVALS
from .inputs import Inputs, random_inputs


def num_bytes(case: Case, precision: str) -> int:
    """Unique bytes read and written: the weights of experts that have tokens, tokens, and sums."""
    shape = case.shape
    width = 2 if precision == "bf16" else 1
    scales = 4 * (2 * shape.intermediate + shape.hidden)
    if precision == "fp8-block":
        scales = 4 * 3 * ceil_div(shape.intermediate, GROUP) * ceil_div(shape.hidden, GROUP)
    of_expert = width * shape.expert_weights + (0 if precision == "bf16" else scales)
    router = 2 * shape.experts * shape.hidden
    return case.distinct * of_expert + router + 2 * 2 * case.m * shape.hidden


def floor(case: Case, precision: str, device: torch.device) -> float | None:
    """Return the roofline in seconds: what is read, experts once, or what is multiplied."""
    roofline = roofline_of(device)
    if roofline is None:
        return None
    width = 2 if precision == "bf16" else 1
    return roofline.seconds(num_bytes(case, precision), case.flops, width)


def _inputs(case: Case, precision: Any, device: torch.device) -> Any:
    return random_inputs(case, precision, device)


BENCHMARK: Benchmark[Case, Inputs] = Benchmark(
    section="moe",
    parse=Case.parse,
    inputs=one_layout_at_a_time(_inputs),
    check=CHECK,
    num_bytes=num_bytes,
    summary=Summary(
        peer="peer",
        rivals=lambda ours, name: name in RIVALS.get(ours, ()),
        groups={
            "all": lambda case: True,
            "M <= 4": lambda case: case.m <= 4,
            "8 <= M <= 128": lambda case: 8 <= case.m <= 128,
            "M >= 2048": lambda case: case.m >= 2048,
        },
        label=lambda case: f"M = {case.m}, {case.routing}",
    ),
    peers=PEERS,
    floor=floor,
)
