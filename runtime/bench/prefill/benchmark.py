"""`bench prefill`: attention of prompts, ours and the peers'."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from ..harness.benchmark import Benchmark, Implementation, one_layout_at_a_time
from ..harness.check import MAX_ERROR, Sample, sample_check
from ..harness.kv_cache import KVLayout
from ..harness.summary import OURS, Cell, Summary
from ..shapes import is_16_bit_twin
from .cases import DIM, Case
from .impls import FP8_PEERS, PEERS
from .inputs import DTYPE, FP8, Inputs, checked_rows, expected, random_inputs

Times = Mapping[Case, Mapping[str, float]]

# Rounding weights to e4m3 makes up to 1/28 of it.
_MAX_FP8_ERROR = 0.05


def _is_plain(case: Case) -> bool:
    """Return whether a case has whole packed texts of one length and a causal mask alone."""
    return case.is_dense and case.is_square and case.causal and not case.window


# Groups of cases with a mean of their own, for which the kernels have targets.
GROUPS: dict[str, Callable[[Case], bool]] = {
    "all": lambda case: True,
    "causal, head dim 128, texts of 1024 and more": lambda case: (
        _is_plain(case) and case.dim == DIM and case.queries >= 1024
    ),
    "head dims 64 and 256": lambda case: case.dim in (64, 256),
    "in pages": lambda case: case.page > 0,
}


def samples(case: Case, inputs: Inputs) -> list[Sample]:
    """Return rows at both ends of the first and last sequence, and fp32 attention for them."""
    found = []
    for sequence in dict.fromkeys((0, case.batch - 1)):
        rows = checked_rows(case.q_lens[sequence], inputs.q.device)
        begin = int(inputs.cu_seqlens_q[sequence])
        right = expected(inputs, case, sequence, rows)
        found.append(Sample(f"sequence {sequence}", begin + rows, right))
    return found


def num_bytes(case: Case, layout: torch.dtype | KVLayout) -> int:
    """Unique bytes read and written."""
    if isinstance(layout, KVLayout):
        return case.num_bytes_over(layout.head_bytes(case.dim), DTYPE.itemsize)
    return case.num_bytes(layout.itemsize, DTYPE.itemsize)


def is_rival(impl: str, name: str) -> bool:
    """Return whether a name is of a peer with queries of the same dtype, or ours over 16 bits."""
    peer = not name.startswith(OURS) and impl.endswith("fp8") == name.endswith("fp8")
    return peer or is_16_bit_twin(impl, name)


def _rate_line(cell: Cell[Case]) -> str:
    mine, theirs = (cell.case.flops / us / 1e6 for us in (cell.us, cell.peer_us))
    return f"  {cell.case!s:<22}{mine:7.0f}, {cell.peer} {theirs:.0f}: {mine / theirs:.3f} of it"


def _page_lines(impl: str, ours: Times) -> list[str]:
    lines = []
    for case in sorted(ours):
        packed = replace(case, page=0)
        if case.page and impl in ours[case] and impl in ours.get(packed, {}):
            ratio = ours[case][impl] / ours[packed][impl]
            lines.append(f"  {case} / {packed}: ×{ratio:.3f}")
    return lines


def _benchmark(peers: Mapping[str, Implementation[Case, Inputs] | str]) -> Benchmark[Case, Inputs]:
    return Benchmark(
        section="prefill",
        parse=Case.parse,
        inputs=one_layout_at_a_time(random_inputs),
        check=sample_check(
            samples,
            lambda inputs: inputs.q.shape,
            lambda inputs: _MAX_FP8_ERROR if inputs.q.dtype is FP8 else MAX_ERROR,
        ),
        num_bytes=num_bytes,
        summary=Summary(
            peer="peer", rivals=is_rival, groups=GROUPS, rates=_rate_line, details=_page_lines
        ),
        peers=peers,
    )


# By the dtype of queries and keys, in `DTYPES`.
BENCHMARKS = {"bf16": _benchmark(PEERS), "fp8": _benchmark(FP8_PEERS)}
