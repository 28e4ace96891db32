"""`bench decode`: decode steps of paged attention, ours and the peers'."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import product

from ...bench.decode.cases import (
    DEFAULT_BATCH,
    DEFAULT_HEADS,
    DEFAULT_KV,
    DEFAULT_PAGES,
    DIM,
    Case,
    cases,
)
from ...bench.shapes import KV_SCALES, KV_SUFFIXES
from ..command import Parser, UserError
from .output import check_json_flag
from .run import add_run_flags, run

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
        "--kv-scales",
        nargs="+",
        default=["static"],
        choices=KV_SCALES,
        help="of 8-bit caches: one for all keys and one for all values, or one per token and head "
        "(default static)",
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
    add_run_flags(
        parser,
        "fa3, fa3m (flash_attn_interface or the file OSTINATO_SGL_FLASH_LIBRARY, without and with "
        "its schedule made before), fi, xqa (flashinfer)",
    )
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
    chosen = _check(args)

    from ...bench.decode.benchmark import BENCHMARK
    from ...bench.decode.impls import ours, paged

    kinds = product(args.kv_scales, args.kv_dtype, args.page)
    mine = [ours(page, kv_dtype, scales) for scales, kv_dtype, page in kinds]
    mine = list({each.name: each for each in mine}.values())  # 16 bits have no scales
    return run(args, BENCHMARK, chosen, mine, expand=lambda peer: paged(peer, args.page))


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
