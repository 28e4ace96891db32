"""`bench prefill`: attention of prompts, ours and the peers'."""

from __future__ import annotations

import argparse
import time
from functools import partial
from typing import TYPE_CHECKING

from ...bench.prefill.cases import (
    DEFAULT_CASES,
    FP8_CASES,
    Case,
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
    from ...bench.prefill.impls import Implementation

_FAILED = 1


def add_parser(sections: argparse._SubParsersAction[Parser]) -> None:
    """Add the section to `bench`."""
    parser = sections.add_parser(
        "prefill",
        usage="python -m ostinato bench prefill [options]",
        help="attention of prompts, and that of other libraries",
        description="Time attention of many queries to packed keys or a paged cache: many launches "
        "in one CUDA graph, with inputs that are not in the L2. Every result is checked before it "
        "is timed. Ends with our times relative to those of the fastest peer, and TFLOP/s.",
    )
    parser.add_argument(
        "--dtype",
        choices=("bf16", "fp8"),
        default="bf16",
        help="of queries, keys and values, which are packed if they are fp8 (default: bf16)",
    )
    parser.add_argument(
        "--cases",
        nargs="+",
        metavar="CASE",
        help="such as 4x4096, four texts of 4096 tokens with a causal mask and 32/8 heads of 128; "
        "then, in this order, kv32768: only the last tokens of so many ask; h8/1: heads; d64: of a "
        "head; full: no mask; w1024: window; p16: keys in pages; skew: one text as long, the "
        f"others a sixteenth (default: {', '.join(DEFAULT_CASES)}; "
        f"with fp8 {', '.join(FP8_CASES)})",
    )
    parser.add_argument(
        "--peer",
        nargs="+",
        default=["all"],
        metavar="NAME",
        help="fa3, fa3_nopack, fa3_dense (flash_attn_interface or the file "
        "OSTINATO_SGL_FLASH_LIBRARY), cudnn, fa2 (torch), fi_fa3, fi_fa2 (flashinfer), with fp8 "
        "fa3_fp8; all that "
        "are installed (default) or none",
    )
    add_targets_flag(parser)
    add_budget_flag(parser, "case")
    add_json_flag(parser)
    add_device_flag(parser)
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    budget = Budget(args.budget_s, time.monotonic())
    check_json_flag(args.json)
    try:
        cases = args.cases or (FP8_CASES if args.dtype == "fp8" else DEFAULT_CASES)
        chosen = list(dict.fromkeys(map(Case.parse, cases)))
    except ValueError as error:
        raise UserError(f"--cases: {error}") from error

    import torch

    from ...bench.comparison import read_targets
    from ...bench.prefill.inputs import (
        DTYPE,
        FP8,
    )
    from ...bench.prefill.run import time_cases
    from ...bench.prefill.summary import summary

    with user_errors():
        device = resolve_device(args.device)
        targets = (
            None if args.targets is None else read_targets(args.targets, "prefill", Case.parse)
        )
    output = Output(args.json, device)
    impls = _implementations(args, output)
    dtype = FP8 if args.dtype == "fp8" else DTYPE
    with user_errors(OSError, MemoryError, torch.OutOfMemoryError):
        left = measure(chosen, time_cases(chosen, impls, device, dtype), budget, output)
    output.finish(Case.parse, summary, targets, left)
    return _FAILED if output.failures else 0


def _implementations(args: argparse.Namespace, output: Output) -> list[Implementation]:
    """Return ours and the peers, less those that are not installed, unless asked for by name."""
    from ...bench.prefill.impls import (
        ours,
        peers,
        peers_of,
    )

    known = peers_of(args.dtype)
    find = partial(peers, dtype=args.dtype)
    return [ours(args.dtype), *ready_peers(args.peer, known, find, output)]
