"""Decode steps of paged attention: ours and the peers', checked and then timed side by side."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

import torch

from ..attention_check import Call, checked_calls, sequence_difference
from ..graphs.timing import (
    Rotation,
    interleave,
    rotate,
)
from ..report import Row
from ..results import CaseResult
from .cases import Case
from .impls import Implementation
from .inputs import (
    DTYPE,
    KV_DTYPES,
    Inputs,
    expected,
    random_inputs,
)


def time_cases(
    cases: Sequence[Case], implementations: Sequence[Implementation], device: torch.device
) -> Iterator[CaseResult[Case]]:
    """Time every implementation in every case, yielding cases as they are measured.

    Args:
        cases: what is attended to.
        implementations: who attends; those that share a page size and cache dtype share inputs.
        device: where; what is measured on the CPU is only good for trying this out.
    """
    for turn, case in enumerate(cases):
        yield _time_case(case, implementations, device, turn)
        if device.type == "cuda":
            torch.cuda.empty_cache()  # the caches, and the pools of this case's graphs


def _time_case(
    case: Case, implementations: Sequence[Implementation], device: torch.device, turn: int
) -> CaseResult[Case]:
    result = CaseResult(case)
    seconds: dict[Implementation, list[float]] = {}
    # One layout at a time: several caches of half the GPU's memory do not fit side by side.
    for layout in dict.fromkeys((impl.page, impl.kv_dtype) for impl in implementations):
        sets = random_inputs(case, *layout, device)
        rotations: dict[Implementation, Rotation] = {}
        for impl in implementations:
            if (impl.page, impl.kv_dtype) == layout:
                calls = _checked(impl, case, sets, result)
                if calls:
                    rotations[impl] = rotate(calls, device)
        times = interleave(list(rotations.values()), device, start=turn)
        seconds.update(zip(rotations, times, strict=True))
        del sets, rotations, calls
    result.rows = [
        Row.of(
            "decode",
            str(case),
            impl.name,
            seconds=statistics.median(of_impl),
            num_bytes=num_bytes(case, impl.kv_dtype),
            flops=case.flops,
        )
        for impl, of_impl in seconds.items()
    ]
    return result


def _checked(
    impl: Implementation, case: Case, sets: Sequence[Inputs], result: CaseResult[Case]
) -> list[Call]:
    return checked_calls(
        impl.name,
        lambda: impl.bind(case, sets),
        sets[0].out,
        lambda got: difference(got, sets[0], case),
        result,
        is_ours=impl.is_ours,
    )


def difference(got: torch.Tensor, inputs: Inputs, case: Case) -> str | None:
    """Return what is wrong with a result, None when the first and last sequence's are close.

    Args:
        got: [batch * q_len, heads_q, dim], in any shape of as many elements.
        inputs: what was attended to.
        case: its sizes.
    """
    if got.numel() != inputs.q.numel():
        return f"got shape {list(got.shape)}, expected {list(inputs.q.shape)}"
    rows = got.reshape(inputs.q.shape)
    for sequence in dict.fromkeys((0, case.batch - 1)):
        right = expected(inputs, sequence, case.q_len)
        of_it = rows[sequence * case.q_len : (sequence + 1) * case.q_len]
        wrong = sequence_difference(sequence, of_it, right)
        if wrong is not None:
            return wrong
    return None


def num_bytes(case: Case, kv_dtype: str) -> int:
    """Unique bytes read and written: keys and values, queries and results."""
    rows = case.batch * case.q_len * case.heads_q * case.dim
    return case.kv_bytes(KV_DTYPES[kv_dtype].itemsize) + 2 * rows * DTYPE.itemsize
