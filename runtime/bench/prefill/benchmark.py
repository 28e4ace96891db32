"""Attention of prompts: ours and the peers', checked and then timed side by side."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

import torch

from ..attention_check import MOST_ERROR, Call, checked_calls, sequence_difference
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
    FP8,
    Inputs,
    checked_rows,
    expected,
    random_inputs,
)

# Rounding weights to e4m3 makes up to 1/28 of it.
_MOST_FP8_ERROR = 0.05


def time_cases(
    cases: Sequence[Case],
    implementations: Sequence[Implementation],
    device: torch.device,
    dtype: torch.dtype = DTYPE,
) -> Iterator[CaseResult[Case]]:
    """Time every implementation in every case, yielding cases as they are measured.

    Args:
        cases: what is attended to.
        implementations: who attends; all share the inputs of a case.
        device: where; what is measured on the CPU is only good for trying this out.
        dtype: of queries and keys.
    """
    for turn, case in enumerate(cases):
        yield _time_case(case, implementations, random_inputs(case, device, dtype), turn)
        if device.type == "cuda":
            torch.cuda.empty_cache()  # the inputs, and the pools of this case's graphs


def _time_case(
    case: Case, implementations: Sequence[Implementation], sets: Sequence[Inputs], turn: int
) -> CaseResult[Case]:
    result = CaseResult(case)
    one = sets[0]
    device = one.q.device
    rotations: dict[str, Rotation] = {}
    for impl in implementations:
        calls = _checked(impl, case, sets, result)
        if calls:
            rotations[impl.name] = rotate(calls, device)
    times = interleave(list(rotations.values()), device, start=turn)
    result.rows = [
        Row.of(
            "prefill",
            str(case),
            name,
            seconds=statistics.median(of_impl),
            num_bytes=case.num_bytes(one.q.dtype.itemsize, one.out.dtype.itemsize),
            flops=case.flops,
        )
        for name, of_impl in zip(rotations, times, strict=True)
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
        # A module that FlashInfer may not compile now is a FileNotFoundError in some versions.
        refusals=(RuntimeError, ValueError, OSError),
    )


def difference(got: torch.Tensor, inputs: Inputs, case: Case) -> str | None:
    """Return what is wrong with a result, None when the ends of two sequences are close.

    Args:
        got: [total_q, heads_q, dim], in any shape of as many elements.
        inputs: what was attended to.
        case: its sizes.
    """
    if got.numel() != inputs.q.numel():
        return f"got shape {list(got.shape)}, expected {list(inputs.q.shape)}"
    outputs = got.reshape(inputs.q.shape)
    for sequence in dict.fromkeys((0, case.batch - 1)):
        rows = checked_rows(case.q_lens[sequence], inputs.q.device)
        right = expected(inputs, case, sequence, rows)
        begin = int(inputs.cu_seqlens_q[sequence])
        most = _MOST_FP8_ERROR if inputs.q.dtype is FP8 else MOST_ERROR
        wrong = sequence_difference(sequence, outputs[begin + rows], right, most)
        if wrong is not None:
            return wrong
    return None
