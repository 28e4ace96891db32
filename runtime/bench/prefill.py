"""Attention of prompts: ours and the peers', checked and then timed side by side."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

import torch

from ostinato.bench.graph_timing import Rotation, interleave, rotate
from ostinato.bench.prefill_cases import Case
from ostinato.bench.prefill_impls import Call, Implementation
from ostinato.bench.prefill_inputs import DTYPE, Inputs, checked_rows, expected, random_inputs
from ostinato.bench.report import Row
from ostinato.bench.results import CaseResult

# Of the checked queries of a sequence, the norm of their error relative to their results' own.
# Rounding weights and results to bf16 makes some 0.003 of it.
MOST_ERROR = 0.01


def time_cases(
    cases: Sequence[Case], implementations: Sequence[Implementation], device: torch.device
) -> Iterator[CaseResult[Case]]:
    """Time every implementation in every case, yielding cases as they are measured.

    Args:
        cases: what is attended to.
        implementations: who attends; all share the inputs of a case.
        device: where; what is measured on the CPU is only good for trying this out.
    """
    for turn, case in enumerate(cases):
        yield _time_case(case, implementations, device, turn)
        if device.type == "cuda":
            torch.cuda.empty_cache()  # the inputs, and the pools of this case's graphs


def _time_case(
    case: Case, implementations: Sequence[Implementation], device: torch.device, turn: int
) -> CaseResult[Case]:
    result = CaseResult(case)
    sets = random_inputs(case, device)
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
            num_bytes=case.num_bytes(DTYPE.itemsize),
            flops=case.flops,
        )
        for name, of_impl in zip(rotations, times, strict=True)
    ]
    return result


def _checked(
    impl: Implementation, case: Case, sets: Sequence[Inputs], result: CaseResult[Case]
) -> list[Call]:
    # What is not written must not pass for a result of the implementation before.
    sets[0].out.fill_(torch.nan)
    try:
        calls = impl.bind(case, sets)
        got = calls[0]()
    # A module that FlashInfer may not compile now is a FileNotFoundError in some of its versions.
    except (RuntimeError, ValueError, OSError) as error:
        result.refuse(impl.name, error, is_ours=impl.is_ours)
        return []
    wrong = difference(got, sets[0], case)
    if wrong is not None:
        result.failures[impl.name] = f"wrong result: {wrong}"
        return []
    return calls


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
        error = outputs[begin + rows].float() - right
        relative = (error.norm() / right.norm()).item()
        if not relative <= MOST_ERROR:  # True for NaN
            return f"sequence {sequence} is off by {relative:.2g}, expected {MOST_ERROR:g} at most"
    return None
