"""`tune`: measures which kernels products shall use on this GPU."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

from ..bench.gemm.cases import SHAPE_GROUPS, Case, Shape, linear_shapes, parse_shapes
from .budget import Budget, add_budget_flag
from .command import FAILED, Command, Parser, check_folder, find_model, user_errors
from .device import add_device_flag, resolve_device
from .gemm_flags import add_dtype_flag, check_tokens

if TYPE_CHECKING:
    import torch

    from ..bench.tune.run import Timed


def _parser() -> Parser:
    parser = Parser(
        prog="ostinato tune",
        usage="python -m ostinato tune [--shapes S ... | --model DIR] [options]",
        description="Time the kernels and tiles that may be the fastest for products, and "
        "keep the best in a file that the ops read. What it has already is not timed again, so "
        "that a run which was interrupted can be taken up.",
    )
    products = parser.add_mutually_exclusive_group()
    products.add_argument(
        "--shapes",
        nargs="+",
        metavar="S",
        help=f"weights as NxK, or those of {', '.join(SHAPE_GROUPS)} (default: all of these)",
    )
    products.add_argument(
        "--model", type=Path, metavar="DIR", help="the weights of this checkpoint's linear layers"
    )
    add_dtype_flag(parser)
    parser.add_argument(
        "--m",
        type=int,
        nargs="+",
        metavar="M",
        help="tokens; what is best for M is used from the next smaller one on, and nothing for "
        "fewer than the smallest (default: powers of two and the sizes of tiles, to 8192)",
    )
    parser.add_argument("--again", action="store_true", help="time also what the file has already")
    add_budget_flag(parser, "shape")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="F",
        help="the file (default: the one that the ops read, OSTINATO_GEMM_TABLE or in the "
        "kernels' cache)",
    )
    parser.add_argument(
        "--all-times", type=Path, metavar="F", help="write the times of all that was timed here"
    )
    add_device_flag(parser)
    return parser


def _main(argv: Sequence[str]) -> int:
    started = time.monotonic()
    args = _parser().parse_args(argv)
    budget = Budget(args.budget_s, started)
    _check(args)

    import torch

    from ..bench.gemm.impls import DTYPES
    from ..bench.tune.run import TUNED_M, tune_shape
    from ..bench.tune.table import Table, known_choices
    from ..jit.location import create_cache_folder
    from ..ops.linear import tile_tuning

    with user_errors():
        device = _cuda(args.device)
        shapes = _shapes(args)
        out = args.out or Path(os.environ.get(tile_tuning.VARIABLE) or tile_tuning.tuning_path())
        create_cache_folder(out.parent)  # or that of the table which the variable names
        gpu = torch.cuda.get_device_name(device)
        table = Table(gpu, known_choices(out, gpu))
    tokens = sorted(set(args.m or TUNED_M))
    todo: dict[Shape, list[str]] = {}
    for shape, operand in product(shapes, (DTYPES[dtype] for dtype in args.dtype)):
        if args.again or not table.covers(operand, shape, tokens):
            todo.setdefault(shape, []).append(operand)
    print(f"{len(shapes) - len(todo)} of {len(shapes)} shapes are in {out} already", flush=True)
    _compile(todo, tokens, device)
    progress = _Progress(args.all_times, device, sum(map(len, todo.values())) * len(tokens))
    for index, (shape, operands) in enumerate(todo.items()):
        if not budget.allows_another():
            left = ", ".join(map(str, list(todo)[index:]))
            print(f"not tuned, since the budget was spent: {left}")
            break
        for operand, rows in tune_shape(shape, operands, tokens, device, progress.add).items():
            table.put(operand, shape, rows, tokens[0])
        with user_errors(OSError, ValueError):
            table.write(out)
            progress.write()
    return FAILED if progress.failures else 0


def _check(args: argparse.Namespace) -> None:
    check_tokens(args.m or ())
    check_folder("--out", args.out)
    check_folder("--all-times", args.all_times)
    if args.model is not None:
        args.model = find_model("--model", args.model, weights=False)


def _cuda(name: str | None) -> torch.device:
    import torch

    from ..ops.common.device import device_index

    device = resolve_device(name)
    if device.type != "cuda":
        raise ValueError("--device: got the CPU, expected a CUDA device, whose kernels are timed")
    return torch.device("cuda", device_index(device))


def _shapes(args: argparse.Namespace) -> list[Shape]:
    if args.model is None:
        try:
            return parse_shapes(args.shapes or list(SHAPE_GROUPS))
        except ValueError as error:
            raise ValueError(f"--shapes: {error}") from error
    from ..checkpoint import load_config

    config = load_config(args.model)
    return linear_shapes(
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
    )


def _compile(
    todo: Mapping[Shape, Sequence[str]], tokens: Sequence[int], device: torch.device
) -> None:
    """Compile all kernels that will be timed, side by side."""
    import torch

    from ..bench.tune.run import choices
    from ..ops.linear.precompile import precompile

    sms = torch.cuda.get_device_properties(device).multi_processor_count
    precompile(
        choice.variant
        for shape, operands in todo.items()
        for m, operand in product(tokens, operands)
        for choice in choices(Case(shape, m), operand, sms)
    )


class _Progress:
    """A line for every case that was timed, and the file of all times."""

    def __init__(self, all_times: Path | None, device: torch.device, count: int) -> None:
        from ..bench.report import Report

        self._all_times = all_times
        self._report = Report.for_device(device)
        self._count = count
        self._done = 0
        self.failures = 0

    def add(self, operand: str, case: Case, timed: Sequence[Timed]) -> None:
        from ..bench.tune.run import fastest
        from ..bench.tune.table import time_row

        self._done += 1
        best, width = fastest(timed), len(str(self._count))
        cut = " ".join(f"{name} {value}" for name, value in best.choice.cut.items() if value)
        print(
            f"[{self._done:{width}}/{self._count}] {case} {operand}: {best.us:.2f} µs "
            f"(table {timed[0].us:.2f}) of {len(timed)}: {best.choice.variant.name} {cut}",
            flush=True,
        )
        for one in timed:
            if one.failure:
                self.failures += 1
                print(f"FAILED: {one.choice}: {one.failure}", flush=True)
            else:
                self._report.rows.append(time_row(operand, case, one))

    def write(self) -> None:
        if self._all_times is not None:
            self._report.write(self._all_times)


COMMAND = Command("measure the fastest GEMM kernels for this GPU", _main)
