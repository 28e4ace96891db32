"""`bench burst`: decode steps in one launch against steps launched one by one."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from ...bench.shapes import PRECISIONS, SHAPES
from ..command import Parser, check_folder, user_errors
from ..device import add_device_flag, resolve_device
from .picture import add_plot_flag, check_plot_flag, plot

if TYPE_CHECKING:
    from ...bench.graphs.burst import BurstRow

_HEADER = (
    f"{'case':<32}{'impl':<10}{'host':<8}{'µs mean':>12}{'p50':>10}{'p99':>12}{'jitter':>12}"
    "  tokens"
)
_SAME = {None: "", True: "as stepping", False: "DIFFER"}


def add_parser(sections: argparse._SubParsersAction[Parser]) -> None:
    """Add the section to `bench`."""
    burst = sections.add_parser(
        "burst",
        usage="python -m ostinato bench burst --shape NAME [options]",
        help="many decode steps in one launch",
        description="Time bursts of the engine's decode step, each step feeding the next on the "
        "device, and the same steps run one by one, with the host idle and loaded.",
    )
    burst.add_argument(
        "--shape", choices=SHAPES, required=True, help="random weights of a model's shape"
    )
    burst.add_argument(
        "--dtype", choices=PRECISIONS, default="int8", help="of the linear layers' weights"
    )
    burst.add_argument(
        "--batch", type=int, nargs="+", default=[1], metavar="B", help="sequences (default 1)"
    )
    burst.add_argument(
        "--context", type=int, default=512, metavar="N", help="tokens at first (default 512)"
    )
    burst.add_argument("--steps", type=int, default=64, metavar="N", help="of a burst (default 64)")
    burst.add_argument(
        "--repeats", type=int, default=6, metavar="N", help="bursts of a sample (default 6)"
    )
    burst.add_argument("--json", type=Path, metavar="F", help="write the results to this file")
    add_plot_flag(burst)
    add_device_flag(burst)
    burst.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    check_folder("--json", args.json)
    check_plot_flag(args.plot)

    import torch

    from ...bench.graphs.burst import BurstPlan, time_bursts
    from ...bench.report import Report
    from ...bench.weights import random_decoder
    from ...models import compile_kernels, read_config

    plan = BurstPlan(args.batch, args.context, args.steps, args.repeats)
    config = read_config(SHAPES[args.shape])
    with user_errors(ValueError, OSError):
        device = resolve_device(args.device)
        plan.check(config)
    report = Report.for_device(device)
    print(f"{report.gpu}, commit {report.commit or 'unknown'}", _HEADER, sep="\n", flush=True)
    differ = False
    with user_errors(OSError, MemoryError, torch.OutOfMemoryError):
        model = random_decoder(config, args.dtype, device, max_context=plan.context + plan.steps)
        compile_kernels(model)
        for row in time_bursts(model, f"{args.shape} {args.dtype}", plan):
            print(_line(row), flush=True)
            report.rows.append(row)
            differ |= row.identical is False
            if args.json is not None:
                report.write(args.json)
    plot(args.plot, "burst", report)
    return int(differ)


def _line(row: BurstRow) -> str:
    return (
        f"{row.case:<32}{row.impl:<10}{row.host:<8}{row.us_mean:>12.1f}{row.us_p50:>10.1f}"
        f"{row.us_p99:>12.1f}{row.jitter_us:>12.1f}  {_SAME[row.identical]}"
    )
