"""`bench decode`: decode steps of paged attention, ours and the peers'."""

from __future__ import annotations

import re
from collections.abc import Callable

import torch

from ..harness.benchmark import Benchmark, one_layout_at_a_time
from ..harness.check import Sample, sample_check
from ..harness.summary import OURS, Summary
from ..shapes import is_16_bit_twin
from .cases import Case
from .inputs import DTYPE, Inputs, Layout, expected, random_inputs

_PAGED = re.compile(r"\w+_p\d+")
_MB = 10**6
# Groups of cases with a mean of their own, by the size of a 16-bit cache.
GROUPS: dict[str, Callable[[Case], bool]] = {
    "all": lambda case: True,
    "KV below 64 MB": lambda case: case.kv_bytes(2) < 64 * _MB,
    "KV above 512 MB": lambda case: case.kv_bytes(2) > 512 * _MB,
}


def samples(case: Case, inputs: Inputs) -> list[Sample]:
    """Return the rows of the first and the last sequence, and attention in fp32 for them."""
    return [
        Sample(
            f"sequence {sequence}",
            torch.arange(case.q_len, device=inputs.q.device) + sequence * case.q_len,
            expected(inputs, sequence, case.q_len),
        )
        for sequence in dict.fromkeys((0, case.batch - 1))
    ]


def num_bytes(case: Case, layout: Layout) -> int:
    """Unique bytes read and written: keys and values, queries and results."""
    rows = case.batch * case.q_len * case.heads_q * case.dim
    kv = case.kv_bytes(1) // case.dim * layout.kv.head_bytes(case.dim)
    return kv + 2 * rows * DTYPE.itemsize


def is_rival(impl: str, name: str) -> bool:
    """Return whether a name, with its page, is of a paged peer, or ours over a 16-bit cache."""
    paged = _PAGED.fullmatch(name) is not None and not name.startswith(OURS)
    return paged or is_16_bit_twin(impl, name)


BENCHMARK: Benchmark[Case, Inputs] = Benchmark(
    section="decode",
    parse=Case.parse,
    # Several caches of half the GPU's memory do not fit side by side.
    inputs=one_layout_at_a_time(random_inputs),
    check=sample_check(samples, lambda inputs: inputs.q.shape),
    num_bytes=num_bytes,
    summary=Summary(peer="paged peer", rivals=is_rival, groups=GROUPS),
    peers={
        "fa3": "flash_attn_3.py",
        "fa3m": "flash_attn_3.py",
        "fi": "flashinfer.py",
        "xqa": "flashinfer.py",
    },
)
