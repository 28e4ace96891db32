"""`bench prefill`: attention of prompts, ours and the peers'."""

from __future__ import annotations

import argparse
from itertools import product

from ...bench.prefill.cases import DEFAULT_CASES, FP8_CASES, Case
from ...bench.shapes import KV_SCALES, KV_SUFFIXES
from ..command import Parser, UserError
from .output import check_json_flag
from .run import add_run_flags, run


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
        "--kv-dtype",
        nargs="+",
        choices=KV_SUFFIXES,
        help="of our pages beside bf16 queries, in cases with pages alone; the peers' are bf16 "
        "(default bf16)",
    )
    parser.add_argument(
        "--kv-scales",
        nargs="+",
        default=["static"],
        choices=KV_SCALES,
        help="of 8-bit pages: one for all keys and one for all values, or one per token and head "
        "(default static)",
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
    add_run_flags(
        parser,
        "fa3, fa3_nopack, fa3_dense (flash_attn_interface or the file OSTINATO_SGL_FLASH_LIBRARY), "
        "cudnn, fa2 (torch), fi_fa3, fi_fa2 (flashinfer), with fp8 fa3_fp8",
    )
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    check_json_flag(args.json)
    if args.dtype == "fp8" and args.kv_dtype is not None:
        raise UserError("--kv-dtype goes with --dtype bf16: FP8 queries have packed keys")
    try:
        cases = args.cases or (FP8_CASES if args.dtype == "fp8" else DEFAULT_CASES)
        chosen = list(dict.fromkeys(map(Case.parse, cases)))
    except ValueError as error:
        raise UserError(f"--cases: {error}") from error

    for case in chosen:
        if args.kv_dtype is not None and not case.page:
            raise UserError(f"--kv-dtype: got case {case}, expected cases with pages, such as p16")

    from ...bench.prefill.benchmark import BENCHMARKS
    from ...bench.prefill.impls import DTYPES, ours, ours_over

    mine = [ours(args.dtype)]
    if args.kv_dtype is not None:
        kinds = product(args.kv_scales, args.kv_dtype)
        found = [ours_over(kv_dtype, scales) for scales, kv_dtype in kinds]
        mine = list({each.name: each for each in found}.values())  # bf16 has no scales
    return run(
        args,
        BENCHMARKS[args.dtype],
        chosen,
        mine,
        expand=lambda peer: [peer] if peer.layout is DTYPES[args.dtype] else [],
    )
