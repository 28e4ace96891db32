"""`bench all-reduce`: sums over ranks, ours, NCCL's and torch's, one process for each GPU."""

from __future__ import annotations

import argparse
import os
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from ..command import FAILED, Parser, UserError, user_errors
from ..device import add_device_flag
from ..ranks import device_of, world_size
from .output import Output, add_json_flag, add_peers_flag, check_json_flag

if TYPE_CHECKING:
    import torch

    from ...bench.all_reduce.cases import Case
    from ...bench.all_reduce.impls import Sums

_ROWS = (1, 2, 4, 8, 16, 32, 64, 256, 1024, 4096, 8192)
_FORMS = ("sum", "int8", "fp8")
_PEERS = ("nccl", "symm_one_shot", "symm_two_shot")
_ADAPTER, _ADAPTED = "vllm_all_reduce.py", "vllm_custom"
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
        # torchrun takes --m for an abbreviation of its own options, wherever it stands.
        *("--rows", "--m"),
        dest="m",
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
        choices=("none", *_PEERS, _ADAPTED),
        nargs="+",
        default=list(_PEERS),
        help="nccl, symm_one_shot and symm_two_shot (torch's sums over symmetric memory; these by "
        "default on GPUs), vllm_custom, which needs vLLM, or none. What follows their sums is ours",
    )
    add_peers_flag(parser)
    add_json_flag(parser)
    add_device_flag(parser)
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    check_json_flag(args.json)
    size = world_size()
    if size < 2:
        raise UserError(f"got one process, expected one for each of several GPUs: {_START}")
    chosen = _cases(args, size)
    adapted = _adapted(args) if _ADAPTED in args.peer else []

    import torch
    from torch import distributed

    with user_errors(RuntimeError, ValueError):
        device = device_of(args)
        options: dict[str, Any] = {"backend": "gloo"}
        if device.type == "cuda":
            torch.cuda.set_device(device)
            options = {"backend": "nccl", "device_id": device}
        distributed.init_process_group(timeout=timedelta(seconds=_TIMEOUT_S), **options)
    try:
        return _measure(args, chosen, adapted, device)
    finally:
        distributed.destroy_process_group()


def _cases(args: argparse.Namespace, size: int) -> list[Case]:
    from ...bench.all_reduce.cases import cases

    try:
        return cases(size, args.m, args.hidden, args.form)
    except ValueError as error:
        raise UserError(f"--rows, --hidden: {error}") from error


def _adapted(args: argparse.Namespace) -> list[Sums]:
    from ...bench.harness.peers import adapter_folder, adapter_named

    with user_errors(ImportError, ValueError):
        adapter = adapter_named(_ADAPTER, adapter_folder(args.peers, os.environ))
        found: list[Sums] = adapter.peers("all_reduce", os.environ)
        return found


def _measure(
    args: argparse.Namespace, chosen: list[Case], adapted: list[Sums], device: torch.device
) -> int:
    from torch import distributed

    from ...bench.all_reduce.cases import Case
    from ...bench.all_reduce.impls import ours, peers
    from ...bench.all_reduce.run import SUMMARY, time_case
    from ...ops.collective.communicator import GroupCommunicator
    from ...ops.collective.peers import PeerCommunicator, connect_peers

    group = distributed.group.WORLD
    assert group is not None
    # Ranks agree, and know what sums should be, without what is timed.
    ranks = GroupCommunicator(group, device)
    output = Output(args.json, device) if ranks.rank == 0 else None
    impls = [ours(ranks)]
    if device.type == "cuda":
        communicator = connect_peers(group, device, timeout_s=_TIMEOUT_S)
        if output is not None and not isinstance(communicator, PeerCommunicator):
            output.say("the GPUs do not reach each other's memory: ours gathers by NCCL and adds")
        known = [peer for peer in peers(group) if peer.name in args.peer]
        impls = [ours(communicator), *known, *adapted]
    failures = 0
    for case in chosen:
        result = time_case(case, impls, ranks)
        failures += len(result.failures)
        if output is not None:
            output.add(result)
    if output is not None:
        output.finish_rows(SUMMARY, Case.parse)
    return FAILED if failures else 0
