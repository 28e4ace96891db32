"""`bench moe`: blocks of mixtures of experts, ours and the peers'."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from ...bench.shapes import PRECISIONS
from ..command import Parser, UserError
from ..gemm_flags import check_tokens
from .output import check_json_flag
from .run import add_run_flags, run

if TYPE_CHECKING:
    from ...bench.moe.cases import Case

_SHAPES = ("qwen3-30b-a3b", "mixtral-8x7b")
_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 2048, 8192)
_ROUTINGS = ("balanced", "skewed", "one")


def add_parser(sections: argparse._SubParsersAction[Parser]) -> None:
    """Add the section to `bench`."""
    parser = sections.add_parser(
        "moe",
        usage="python -m ostinato bench moe [options]",
        help="blocks of mixtures of experts, and those of other libraries",
        description="Time a block of experts: from normalised tokens over the router, the chosen "
        "experts and the sum of what they return, many launches in one CUDA graph, of experts "
        "that are not in the L2. Every result is checked before it is timed.",
    )
    parser.add_argument(
        "--dtype",
        choices=PRECISIONS,
        nargs="+",
        default=list(PRECISIONS),
        help="of weights (default: all)",
    )
    parser.add_argument(
        "--shapes",
        nargs="+",
        default=list(_SHAPES),
        metavar="S",
        help=f"blocks of {', '.join(_SHAPES)} (default: all), or such as E128k8H2048I768: "
        "experts, a token's, hidden and intermediate size",
    )
    parser.add_argument(
        "--m",
        type=int,
        nargs="+",
        default=list(_TOKENS),
        metavar="M",
        help=f"tokens (default {' '.join(map(str, _TOKENS))})",
    )
    parser.add_argument(
        "--routing",
        choices=_ROUTINGS,
        nargs="+",
        default=list(_ROUTINGS),
        help="how tokens choose: all experts in turn, the r-th expert 1 / r as often as the "
        "first, or all tokens the same experts (default: all)",
    )
    parser.add_argument(
        "--cases",
        nargs="+",
        metavar="CASE",
        help="these alone, such as 'E128 k8 H2048 I768 M8 balanced', whatever --shapes, --m and "
        "--routing say",
    )
    add_run_flags(
        parser,
        "vllm_i8, vllm_f8, vllm_f8t, vllm_blk, vllm_bf16 (vLLM's fused experts in Triton), vllm_dg "
        "(vLLM's chain around DeepGEMM's grouped products), grp_f8 and grp_bf16 (torch's grouped "
        "products, of CUTLASS, between our routing and our sum)",
    )
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    chosen = _check(args)

    from ...bench.moe.benchmark import BENCHMARK
    from ...bench.moe.impls import ours

    mine = [ours(dtype) for dtype in args.dtype]
    return run(args, BENCHMARK, chosen, mine, rivals_alone=True)


def _check(args: argparse.Namespace) -> list[Case]:
    from ...bench.moe.cases import Case, Shape, cases

    check_tokens(args.m)
    check_json_flag(args.json)
    if args.cases is not None:
        try:
            return [Case.parse(text) for text in args.cases]
        except ValueError as error:
            raise UserError(f"--cases: {error}") from error
    try:
        return cases([Shape.parse(text) for text in args.shapes], args.m, args.routing)
    except ValueError as error:
        raise UserError(f"--shapes: {error}") from error
