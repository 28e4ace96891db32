"""`bench gemm`: W8A8 and bf16 products, ours and the peers'."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ...bench.gemm.cases import (
    BLOCK_SHAPE_GROUPS,
    DEFAULT_M,
    EDGE_M,
    SHAPE_GROUPS,
    Case,
    cases,
    parse_shapes,
)
from ..command import Parser, UserError
from ..gemm_flags import add_dtype_flag, check_tokens
from .output import check_json_flag
from .run import add_run_flags, run

if TYPE_CHECKING:
    import torch

_SGL_LIBRARY = "OSTINATO_SGL_LIBRARY"  # read by the adapter of sglang-kernel
_PDL = {"on": (True,), "off": (False,), "both": (True, False)}


def add_parser(sections: argparse._SubParsersAction[Parser]) -> None:
    """Add the section to `bench`."""
    parser = sections.add_parser(
        "gemm",
        usage="python -m ostinato bench gemm [options]",
        help="W8A8 and bf16 products, and those of other libraries",
        description="Time products of activations and packed weights: many launches in one CUDA "
        "graph, with inputs that are not in the L2. Every result is checked before it is timed. "
        "Ends with our times relative to those of the fastest peer: of W8A8 products, or of bf16 "
        "ones for ours in bf16.",
    )
    add_dtype_flag(parser)
    parser.add_argument(
        "--shapes",
        nargs="+",
        default=list(SHAPE_GROUPS),
        metavar="S",
        help=f"weights as NxK, or those of {', '.join(SHAPE_GROUPS)} (default: all of these), "
        f"{', '.join(BLOCK_SHAPE_GROUPS)}",
    )
    parser.add_argument(
        "--m",
        type=int,
        nargs="+",
        default=list(DEFAULT_M),
        metavar="M",
        help=f"tokens (default {' '.join(map(str, DEFAULT_M))})",
    )
    parser.add_argument(
        "--edges",
        action="store_true",
        help=f"these tokens as well: {' '.join(map(str, EDGE_M))}",
    )
    parser.add_argument(
        "--sgl-library",
        type=Path,
        metavar="F",
        help="common_ops.abi3.so of sglang-kernel (default: OSTINATO_SGL_LIBRARY, or else the "
        "installed package)",
    )
    parser.add_argument(
        "--pdl",
        choices=_PDL,
        default="on",
        help="programmatic dependent launch of ours (default on)",
    )
    parser.add_argument(
        "--sustained",
        action="store_true",
        help="time what the power limit leaves of the clock after 160 ms, not a card at rest",
    )
    add_run_flags(
        parser,
        "sgl_i8, sgl_f8 (sglang-kernel), smm_row, smm_ten (torch._scaled_mm by row, by tensor), "
        "for fp8-block dg_blk (DeepGEMM), tri_blk (Triton), smm_blk (torch._scaled_mm), for bf16 "
        "bf16 (torch's); int_mm and bf16 beside W8A8 for reference, if they are named",
    )
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    chosen = _check(args)

    from ...bench.gemm.benchmark import BENCHMARK
    from ...bench.gemm.impls import ours
    from ...bench.harness.rotation import RESTED, SUSTAINED

    def compile_kernels(device: torch.device) -> None:
        if device.type == "cuda":
            _compile(chosen, args.dtype, device)

    library = args.sgl_library
    return run(
        args,
        BENCHMARK,
        chosen,
        [ours(dtype, with_pdl=pdl) for dtype in args.dtype for pdl in _PDL[args.pdl]],
        rivals_alone=True,
        environ={**os.environ, _SGL_LIBRARY: str(library)} if library is not None else None,
        required=library is not None,  # whoever names a library wants it timed
        pace=SUSTAINED if args.sustained else RESTED,
        prepare=compile_kernels,
    )


def _check(args: argparse.Namespace) -> list[Case]:
    tokens = [*args.m, *(EDGE_M if args.edges else ())]
    check_tokens(tokens)
    check_json_flag(args.json)
    try:
        return cases(parse_shapes(args.shapes), tokens)
    except ValueError as error:
        raise UserError(f"--shapes: {error}") from error


def _compile(chosen: Sequence[Case], dtypes: Sequence[str], device: torch.device) -> None:
    """Compile the kernels that the cases take, side by side."""
    from ...bench.gemm.impls import DTYPES, kernel
    from ...ops.linear.precompile import precompile

    needed = {kernel(case, DTYPES[dtype], device) for case in chosen for dtype in dtypes}
    precompile(needed)
