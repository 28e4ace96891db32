"""`bench gemm`: W8A8 and bf16 products, ours and the peers'."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import groupby, pairwise

from ...ops.common.sizes import ceil_div
from ...ops.linear.gemm_variants import BLOCK_E4M3
from ...ops.linear.quantize_cuda import GROUP
from ..harness.benchmark import Benchmark
from ..harness.summary import OURS, Summary
from .cases import SHAPE_GROUPS, Case
from .check import CHECK
from .impls import BF16_PEERS, BLOCK_PEERS, NOT_W8A8, OURS_BF16, PEERS
from .inputs import Inputs, Layout, inputs

Times = Mapping[Case, Mapping[str, float]]

# A time that drops by more when m grows is a cliff: computing more tokens would be faster.
MONOTONE_WITHIN = 1.05

# Groups of cases with a mean of their own, for which the kernels have targets.
GROUPS: dict[str, Callable[[Case], bool]] = {
    "all": lambda case: True,
    "llama-8b, M <= 16": lambda case: case.shape in SHAPE_GROUPS["llama-8b"] and case.m <= 16,
    "M > 1024": lambda case: case.m > 1024,
}


def num_bytes(case: Case, layout: Layout) -> int:
    """Unique bytes read and written."""
    m, n, k = case.m, case.shape.n, case.shape.k
    operand = 2 if layout.operand == "bf16" else 1
    scales = 4 * (m + n) if layout.scaled else 0
    if layout.operand == BLOCK_E4M3:
        scales = 4 * ceil_div(k, GROUP) * (m + ceil_div(n, GROUP))
    return operand * (m * k + n * k) + layout.out_bytes * m * n + scales


def is_rival(impl: str, name: str) -> bool:
    """Return whether a name is of a peer: a bf16 one, or a W8A8 one with scales as ours has."""
    if impl.startswith(OURS_BF16):
        return name in BF16_PEERS
    if name in NOT_W8A8 or name.startswith(OURS):
        return False
    return (name in BLOCK_PEERS) == ("block" in impl)


def cliffs(impl: str, ours: Times) -> list[tuple[Case, Case]]:
    """Return pairs of neighbours in m of which the larger one is clearly faster."""
    found = []
    having = sorted((c for c in ours if impl in ours[c]), key=lambda c: (c.shape, c.m))
    for _, of_shape in groupby(having, lambda case: case.shape):
        for smaller, larger in pairwise(of_shape):
            if ours[smaller][impl] > MONOTONE_WITHIN * ours[larger][impl]:
                found.append((smaller, larger))
    return found


def _cliff_lines(impl: str, ours: Times) -> list[str]:
    return [
        f"  cliff: {before} {ours[before][impl]:.2f} µs, M{after.m} {ours[after][impl]:.2f} µs"
        for before, after in cliffs(impl, ours)
    ]


BENCHMARK: Benchmark[Case, Inputs] = Benchmark(
    section="gemm",
    parse=Case.parse,
    inputs=inputs,
    check=CHECK,
    num_bytes=num_bytes,
    summary=Summary(
        peer="peer",
        rivals=is_rival,
        groups=GROUPS,
        label=lambda case: f"M = {case.m}",
        details=_cliff_lines,
    ),
    peers=PEERS,
)
