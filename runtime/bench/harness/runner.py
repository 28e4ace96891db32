"""The runner: every implementation in every case, checked and then timed side by side."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ..report import FloorRow, Row
from .benchmark import Benchmark, CaseT, Group, Implementation, SetT
from .results import CaseResult
from .rotation import RESTED, Call, Pace, Rotation, interleave, rotate
from .summary import with_peers

# A module that FlashInfer may not compile now is a FileNotFoundError in some of its versions.
_REFUSALS = (RuntimeError, ValueError, OSError)


def time_cases(
    benchmark: Benchmark[CaseT, SetT],
    cases: Sequence[CaseT],
    implementations: Sequence[Implementation[CaseT, SetT]],
    device: torch.device,
    *,
    pace: Pace = RESTED,
) -> Iterator[CaseResult[CaseT]]:
    """Time every implementation in every case, yielding cases as they are measured.

    Args:
        benchmark: whose cases they are.
        cases: what is computed.
        implementations: which compute it; those with one layout share inputs.
        device: where; what is measured on the CPU is only good for trying this out.
        pace: whether each begins on a card at rest or when its clock has settled.
    """
    layouts = list(dict.fromkeys(impl.layout for impl in implementations))
    for turn, (case, groups) in enumerate(benchmark.inputs(cases, layouts, device)):
        result = CaseResult(case)
        while (group := next(groups, None)) is not None:
            here = [impl for impl in implementations if impl.layout in group]
            _time_group(benchmark, result, here, group, device, turn, pace)
            del group  # before the inputs of the next one are made
        result.rows = with_peers(result.rows, benchmark.summary.rivals)
        yield result


def _time_group(
    benchmark: Benchmark[CaseT, SetT],
    result: CaseResult[CaseT],
    implementations: Sequence[Implementation[CaseT, SetT]],
    group: Group[SetT],
    device: torch.device,
    turn: int,
    pace: Pace,
) -> None:
    rotations: dict[Implementation[CaseT, SetT], Rotation] = {}
    references: dict[int, Any] = {}
    for impl in implementations:
        calls = _checked(benchmark, result, impl, group[impl.layout], references)
        if calls:
            rotations[impl] = rotate(calls, device)
    seconds = interleave(list(rotations.values()), device, start=turn, pace=pace)
    for impl, times in zip(rotations, seconds, strict=True):
        row = Row.of(
            benchmark.section,
            str(result.case),
            impl.name,
            seconds=statistics.median(times),
            num_bytes=benchmark.num_bytes(result.case, impl.layout),
            flops=result.case.flops,
        )
        floor = benchmark.floor(result.case, impl.layout, device) if impl.is_ours else None
        result.rows.append(row if floor is None else FloorRow.with_floor(row, floor))


def _checked(
    benchmark: Benchmark[CaseT, SetT],
    result: CaseResult[CaseT],
    impl: Implementation[CaseT, SetT],
    sets: Sequence[SetT],
    references: dict[int, Any],
) -> Sequence[Call]:
    """Return the calls of an implementation, none if it refuses the case or is wrong.

    The reference of these sets is added to `references`, by the sets' identity.
    """
    case = result.case
    if (reason := impl.refuses(case)) is not None:
        result.refuse(impl.name, reason, is_ours=impl.is_ours)
        return []
    one = sets[0]
    # What is not written must not pass for a result of the implementation before.
    one.out.fill_(torch.nan)
    try:
        calls = impl.bind(case, sets)
        got = calls[0]()
    except _REFUSALS as error:
        result.refuse(impl.name, str(error) or type(error).__name__, is_ours=impl.is_ours)
        return []
    if id(sets) not in references:
        references[id(sets)] = benchmark.check.reference(case, one)
    assert isinstance(got, torch.Tensor)
    wrong = benchmark.check.difference(got, references[id(sets)], one, impl.layout)
    if wrong is not None:
        result.failures[impl.name] = f"wrong result: {wrong}"
        return []
    return calls
