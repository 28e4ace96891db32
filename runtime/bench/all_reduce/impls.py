"""Ways to add rows of all ranks: ours, NCCL, and torch's sums over symmetric memory."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import distributed

from ... import ops
from ...ops.collective.peers import PeerCommunicator
from ..harness.rotation import Call
from ..harness.summary import OURS
from .cases import FORMS, Case

EPS = 1e-5


@dataclass(frozen=True)
class Inputs:
    """Tensors of one rank: x and residual [M, H] bf16, the norm's weight [H].

    The residual and the weight are equal on all ranks.
    """

    x: torch.Tensor
    residual: torch.Tensor
    weight: torch.Tensor


@dataclass(frozen=True)
class Sums:
    """An implementation.

    Args:
        name: as rows call it; `OURS` begins the names of ours.
        bind: returns a call that makes a case's results, ready to be captured: (values, scale, sum)
            or (sum,). It may raise ValueError or RuntimeError for a case that it does not take.
        in_place: whether the sum replaces x, which grows with every call.
        check: raises RuntimeError for what calls that have ended left undone.
        capturing: a context for the capture of calls in a graph.
    """

    name: str
    bind: Callable[[Case, Inputs], Call]
    in_place: bool = False
    check: Callable[[], None] = lambda: None
    capturing: Callable[[], AbstractContextManager[None]] = nullcontext


def ours(communicator: ops.Communicator) -> Sums:
    """Return ours: one launch, between ranks with access to each other's memory."""
    bind = partial(_ours, communicator)
    if isinstance(communicator, PeerCommunicator):
        return Sums(OURS, bind, check=communicator.check)
    return Sums(OURS, bind)


def name_of(sums: Sums, case: Case) -> str:
    """Return how a row calls an implementation."""
    suffix = {"sum": "bf16"}.get(case.form, case.form)
    return f"{OURS}{suffix}" if sums.name == OURS else sums.name


def _ours(communicator: ops.Communicator, case: Case, s: Inputs) -> Call:
    dtype = FORMS[case.form]
    if dtype is None:
        return lambda: (ops.all_reduce(s.x, communicator),)
    norm = (s.x, communicator, s.weight, EPS, dtype)
    return lambda: ops.all_reduce_norm_quantize(*norm, residual=s.residual)


def followed(case: Case, s: Inputs, total: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return what our ops make of a sum, and with it all results of a case."""
    dtype = FORMS[case.form]
    if dtype is None:
        return (total,)
    return ops.rms_norm_quantize(total, s.weight, EPS, dtype, residual=s.residual)


def peers(group: distributed.ProcessGroup) -> list[Sums]:
    """Return the peers of a process group on GPUs; after their sums our own ops follow."""
    return [
        Sums("nccl", partial(_nccl, group), in_place=True),
        Sums("symm_one_shot", partial(_one_shot, group)),
        Sums("symm_two_shot", partial(_two_shot, group), in_place=True),
    ]


def _nccl(group: distributed.ProcessGroup, case: Case, s: Inputs) -> Call:
    x = s.x.clone()

    def call() -> tuple[torch.Tensor, ...]:
        distributed.all_reduce(x, group=group)
        return followed(case, s, x)

    return call


def _symmetric(group: distributed.ProcessGroup, s: Inputs) -> torch.Tensor:
    """Return x in symmetric memory."""
    from torch.distributed import _symmetric_memory as symmetric_memory

    x = symmetric_memory.empty(s.x.shape, dtype=s.x.dtype, device=s.x.device)
    symmetric_memory.rendezvous(x, group.group_name)
    return x.copy_(s.x)


def _one_shot(group: distributed.ProcessGroup, case: Case, s: Inputs) -> Call:
    x = _symmetric(group, s)
    add = torch.ops.symm_mem.one_shot_all_reduce
    return lambda: followed(case, s, add(x, "sum", group.group_name))


def _two_shot(group: distributed.ProcessGroup, case: Case, s: Inputs) -> Call:
    x = _symmetric(group, s)
    add = torch.ops.symm_mem.two_shot_all_reduce_
    return lambda: followed(case, s, add(x, "sum", group.group_name))
