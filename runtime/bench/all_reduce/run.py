"""Timing of sums over ranks: every rank runs this, and they agree on each step.

Launches follow each other in one CUDA graph, in which all ranks are within a launch of each other.
x stays in the L2, where the product before a sum leaves it in a model.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import torch

from ... import ops
from ...ops.collective import reference
from ..harness.results import CaseResult
from ..harness.rotation import Call
from ..harness.summary import OURS, Summary, with_peers
from ..report import Row
from ..timing import time_each
from .cases import Case
from .impls import Inputs, Sums, followed, name_of

SECTION = "all_reduce"


def _is_peer(_ours: str, name: str) -> bool:
    return not name.startswith(OURS)


SUMMARY: Summary[Case] = Summary("peer", _is_peer)
_LAUNCHES = 20  # of a graph
_REPLAYS = 30
_WARM = 3
_MAX_ERROR = 0.01  # of a peer's sum, whose order and roundings are its own


def time_case(
    case: Case, implementations: Sequence[Sums], ranks: ops.Communicator
) -> CaseResult[Case]:
    """Time all implementations of a case, ours first: called by all ranks.

    A time is that of the slowest rank; so all ranks return the same.

    Args:
        case: what is added up.
        implementations: that are compared.
        ranks: by which ranks agree and gather what is expected; best none that is timed.
    """
    result = CaseResult(case)
    inputs = make_inputs(case, ranks)
    expected = followed(case, inputs, sum_of_all(case, inputs, ranks))
    for sums in implementations:
        name = name_of(sums, case)
        is_ours = sums is implementations[0]
        problem, call = None, None
        try:
            call = sums.bind(case, inputs)
        except (RuntimeError, ValueError) as error:
            problem = str(error) or type(error).__name__
        problem = _agreed(problem, ranks)
        if problem is None and call is not None:
            problem = _agreed(_wrong(sums, call, expected, exact=is_ours), ranks)
        if problem is not None or call is None:
            result.refuse(name, problem or "not bound", is_ours=is_ours)
            continue
        if sums.in_place:  # sums of sums would overflow
            inputs.x.zero_()
            call = sums.bind(case, inputs)
        seconds = _slowest(_seconds(sums, call, ranks), ranks)
        result.rows.append(
            Row.of(
                SECTION,
                str(case),
                name,
                seconds=seconds,
                num_bytes=case.num_bytes,
                flops=case.flops,
            )
        )
        inputs = make_inputs(case, ranks)
    result.rows = with_peers(result.rows, _is_peer)
    return result


def make_inputs(case: Case, ranks: ops.Communicator) -> Inputs:
    """Return random tensors, of which x is this rank's own."""
    bf16, device = torch.bfloat16, ranks.device
    shared = torch.Generator(device).manual_seed(case.m)
    own = torch.Generator(device).manual_seed(1000 + ranks.rank)
    shape = (case.m, case.hidden)
    return Inputs(
        torch.randn(shape, generator=own, device=device).to(bf16),
        torch.randn(shape, generator=shared, device=device).to(bf16),
        torch.randn(case.hidden, generator=shared, device=device).to(bf16),
    )


def sum_of_all(case: Case, inputs: Inputs, ranks: ops.Communicator) -> torch.Tensor:
    """Return the sum of x in rank order, by torch's operators."""
    parts = ranks.all_gather(inputs.x).view(case.m, ranks.size, case.hidden)
    return reference.all_reduce(parts.unbind(1)).to(inputs.x.dtype)


def _wrong(
    sums: Sums, call: Call, expected: tuple[torch.Tensor, ...], *, exact: bool
) -> str | None:
    """Return what is wrong with a rank's results, None if nothing is.

    Args:
        sums: whose they are; all ranks call this.
        call: gives them.
        expected: what they should be, the sum at the end.
        exact: whether they must have the same bits.
    """
    try:
        results = call()
        if expected[-1].is_cuda:
            torch.cuda.synchronize(expected[-1].device)
        sums.check()
    except (RuntimeError, ValueError) as error:
        return str(error) or type(error).__name__
    assert isinstance(results, tuple)
    if exact:
        same = all(
            got.contiguous().view(torch.uint8).equal(want.contiguous().view(torch.uint8))
            for got, want in zip(results, expected, strict=True)
        )
        return None if same else "its bits are not those of the sum in rank order"
    got, want = results[-1].float(), expected[-1].float()
    off = ((got - want).norm() / want.norm()).item()
    return None if off <= _MAX_ERROR else f"it is off by {off:.2g}, expected {_MAX_ERROR:g}"


def _agreed(problem: str | None, ranks: ops.Communicator) -> str | None:
    """Return this rank's problem, or that another one has one; None if nobody has."""
    own = torch.tensor([[float(problem is not None)]], device=ranks.device)
    failed = ranks.all_gather(own)[0].nonzero().flatten().tolist()
    return problem or (f"rank {failed[0]} says what is wrong" if failed else None)


def _slowest(seconds: float, ranks: ops.Communicator) -> float:
    own = torch.tensor([[seconds]], device=ranks.device)
    return float(ranks.all_gather(own).max())


def _seconds(sums: Sums, call: Call, ranks: ops.Communicator) -> float:
    """Return the seconds of a call, the median of replays; those of one call on the CPU."""
    if ranks.device.type != "cuda":
        return statistics.median(time_each(call, ranks.device, _REPLAYS))
    stream = torch.cuda.Stream(ranks.device)
    with torch.cuda.stream(stream):
        call()  # allocates what libraries keep for each stream
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize(ranks.device)
    with (
        sums.capturing(),
        torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"),
    ):
        kept = [call() for _ in range(_LAUNCHES)]
    for _ in range(_WARM):
        graph.replay()
    taken = statistics.median(time_each(graph.replay, ranks.device, _REPLAYS))
    del kept
    return taken / _LAUNCHES
