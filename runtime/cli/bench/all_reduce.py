"""`bench all-reduce`: sums over ranks, ours, NCCL's and torch's, one process for each GPU."""

from __future__ import annotations

import argparse
import os
from datetime import timedelta
from typing import TYPE_CHECKING

from ..command import FAILED, Parser, UserError, user_errors
from .output import Output, add_json_flag, check_json_flag

if TYPE_CHECKING:
    import torch

    from ...bench.all_reduce.cases import Case

_ROWS = (1, 2, 4, 8, 16, 32, 64, 256, 1024, 4096, 8192)
_FORMS = ("sum", "int8", "fp8")
_PEERS = ("nccl", "symm_one_shot", "symm_two_shot")
_TIMEOUT_S = 60.0
_START = "torchrun --nproc-per-node N -m ostinato bench all-reduce"


def add_parser(sections: argparse._SubParsersAction[Parser]) -> None:
    """Add the section to `bench`."""
    parser = sections.add_parser(
        "all-reduce",
        usage=f"{_START} [options]",
        help="sums over the ranks of a tensor-parallel group, one process for each GPU",
        description="Time the sum of each rank's rows in bf16, alone or with the residual, the RMS "
        "norm and the quantisation that follow, many launches in one CUDA graph on each GPU. "
        "Results are checked first: ours to the bit. `torchrun` starts a process for each GPU.",
    )
    parser.add_argument(
        "--m",
        type=int,
        nargs="+",
        default=list(_ROWS),
        metavar="M",
        help=f"rows (default {' '.join(map(str, _ROWS))})",
    )
    parser.add_argument(
        "--hidden", type=int, default=8192, metavar="H", help="their width (default 8192)"
    )
    parser.add_argument(
        "--form",
        choices=_FORMS,
        nargs="+",
        default=list(_FORMS),
        help="sum: nothing follows; int8, fp8: residual, norm and quantisation (default: all)",
    )
    parser.add_argument(
        "--peer",
        choices=("none", *_PEERS),
        nargs="+",
        default=list(_PEERS),
        help="nccl, symm_one_shot and symm_two_shot (torch's sums over symmetric memory); all "
        "(default) or none. What follows their sums is ours",
    )
    add_json_flag(parser)
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    check_json_flag(args.json)
    size = _world_size()
    chosen = _cases(args, size)

    import torch
    from torch import distributed

    found = torch.cuda.device_count()
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    if found < local_size:
        raise UserError(f"got {found} GPUs for {local_size} ranks, expected one for each")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    with user_errors(RuntimeError, ValueError):
        timeout = timedelta(seconds=_TIMEOUT_S)
        distributed.init_process_group("nccl", timeout=timeout, device_id=device)
    try:
        return _measure(args, chosen, device)
    finally:
        distributed.destroy_process_group()


def _world_size() -> int:
    """Return how many ranks `torchrun` started."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size < 2 or "LOCAL_RANK" not in os.environ:
        raise UserError(f"got one process, expected one for each of several GPUs: {_START}")
    return size


def _cases(args: argparse.Namespace, size: int) -> list[Case]:
    from ...bench.all_reduce.cases import cases

    try:
        return cases(size, args.m, args.hidden, args.form)
    except ValueError as error:
        raise UserError(f"--m, --hidden: {error}") from error


def _measure(args: argparse.Namespace, chosen: list[Case], device: torch.device) -> int:
    from torch import distributed

    from ...bench.all_reduce.cases import Case
    from ...bench.all_reduce.impls import ours, peers
    from ...bench.all_reduce.run import SUMMARY, time_case
    from ...ops.collective.peers import PeerCommunicator, connect_peers

    group = distributed.group.WORLD
    assert group is not None
    communicator = connect_peers(group, device, timeout_s=_TIMEOUT_S)
    output = Output(args.json, device) if communicator.rank == 0 else None
    if output is not None and not isinstance(communicator, PeerCommunicator):
        output.say("the GPUs do not reach each other's memory: ours is NCCL's all-gather and a sum")
    impls = [ours(communicator), *(peer for peer in peers(group) if peer.name in args.peer)]
    failures = 0
    for case in chosen:
        result = time_case(case, impls, communicator)
        failures += len(result.failures)
        if output is not None:
            output.add(result)
    if output is not None:
        output.finish_rows(SUMMARY, Case.parse)
    return FAILED if failures else 0
