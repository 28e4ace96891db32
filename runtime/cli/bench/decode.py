"""`bench decode`: decode steps of paged attention, ours and the peers'."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...bench.decode.cases import (
    DEFAULT_BATCH,
    DEFAULT_HEADS,
    DEFAULT_KV,
    DEFAULT_PAGES,
    DIM,
    KV_SUFFIXES,
    Case,
    cases,
)
from ..budget import Budget, add_budget_flag
from ..command import Parser, UserError, user_errors
from ..device import add_device_flag, resolve_device
from .output import (
    Output,
    add_json_flag,
    add_targets_flag,
    check_json_flag,
)
from .run import (
    measure,
    ready_peers,
)

if TYPE_CHECKING:
    from ...bench.decode.impls import Implementation

_FAILED = 1
_GB = 10**9


def add_parser(sections: argparse._SubParsersAction[Parser]) -> None:
    """Add the section to `bench`."""
    parser = sections.add_parser(
        "decode",
        usage="python -m ostinato bench decode [options]",
        help="decode steps of paged attention, and those of other libraries",
        description="Time paged attention of few queries over long caches: many launches in one "
        "CUDA graph, with caches that are not in the L2. Every result is checked before it is "
        "timed. Ends with our times relative to those of the fastest paged peer.",
    )
    parser.add_argument(
        "--heads",
        nargs="+",
        default=list(DEFAULT_HEADS),
        metavar="Q/KV",
        help=f"query and KV heads (default {' '.join(DEFAULT_HEADS)})",
    )
    _add_sizes(parser, "--batch", DEFAULT_BATCH, "B", "sequences")
    _add_sizes(parser, "--kv", DEFAULT_KV, "N", "tokens of each sequence")
    _add_sizes(parser, "--q-len", (1,), "N", "queries of each sequence")
    _add_sizes(parser, "--head-dim", (DIM,), "D", "of a head")
    _add_sizes(parser, "--page", DEFAULT_PAGES, "N", "tokens of a page")
    parser.add_argument(
        "--kv-dtype",
        nargs="+",
        default=["bf16"],
        choices=KV_SUFFIXES,
        help="of our caches; the peers' are bf16 (default bf16)",
    )
    parser.add_argument(
        "--skew",
        action="store_true",
        help="each case again with one long sequence and others of a sixteenth",
    )
    parser.add_argument(
        "--max-kv-gb",
        type=float,
        default=40.0,
        metavar="GB",
        help="leave out cases with larger bf16 caches (default 40)",
    )
    parser.add_argument(
        "--peer",
        nargs="+",
        default=["all"],
        metavar="NAME",
        help="fa3, fa3m (flash_attn_interface or the file OSTINATO_SGL_FLASH_LIBRARY, without and "
        "with its schedule made before), fi, xqa (flashinfer), all that are installed (default) or "
        "none",
    )
    add_targets_flag(parser)
    add_budget_flag(parser, "case")
    add_json_flag(parser)
    add_device_flag(parser)
    parser.set_defaults(run=_run)


def _add_sizes(
    parser: argparse.ArgumentParser, flag: str, default: Sequence[int], metavar: str, what: str
) -> None:
    parser.add_argument(
        flag,
        type=int,
        nargs="+",
        default=list(default),
        metavar=metavar,
        help=f"{what} (default {' '.join(map(str, default))})",
    )


def _run(args: argparse.Namespace) -> int:
    budget = Budget(args.budget_s, time.monotonic())
    chosen = _check(args)

    import torch

    from ...bench.comparison import read_targets
    from ...bench.decode.run import time_cases
    from ...bench.decode.summary import summary

    with user_errors():
        device = resolve_device(args.device)
        targets = None if args.targets is None else read_targets(args.targets, "decode", Case.parse)
    output = Output(args.json, device)
    impls = _implementations(args, output)
    with user_errors(OSError, MemoryError, torch.OutOfMemoryError):
        left = measure(chosen, time_cases(chosen, impls, device), budget, output)
    output.finish(Case.parse, summary, targets, left)
    return _FAILED if output.failures else 0


def _check(args: argparse.Namespace) -> list[Case]:
    check_json_flag(args.json)
    for page in args.page:
        if page < 1:
            raise UserError(f"--page: got {page}, expected at least 1")
    try:
        chosen = cases(
            args.heads,
            args.batch,
            args.kv,
            q_lens=args.q_len,
            dims=args.head_dim,
            skews=(False, True) if args.skew else (False,),
            max_kv_bytes=args.max_kv_gb * _GB,
        )
    except ValueError as error:
        raise UserError(str(error)) from error
    if not chosen:
        raise UserError(f"--max-kv-gb: got {args.max_kv_gb:g}, expected room for a case")
    return chosen


def _implementations(args: argparse.Namespace, output: Output) -> list[Implementation]:
    """Return ours and the peers, less those that are not installed, unless asked for by name."""
    from ...bench.decode.impls import (
        PEERS,
        ours,
        peers,
    )

    impls = [ours(page, kv_dtype) for kv_dtype in args.kv_dtype for page in args.page]
    found = ready_peers(args.peer, PEERS, lambda names: peers(names, args.page), output)
    return impls + found
