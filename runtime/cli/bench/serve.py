"""`bench serve`: load on an OpenAI-compatible server, and what its clients see."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..command import FAILED, Parser, check_folder, user_errors
from .picture import add_plot_flag, check_plot_flag, plot

if TYPE_CHECKING:
    from ...bench.serve.client import Server, Stream
    from ...bench.serve.load import Load
    from ...bench.serve.row import ServeRow
    from ...bench.serve.step import StepRow


def add_parser(sections: argparse._SubParsersAction[Parser]) -> None:
    """Add the section to `bench`."""
    serve = sections.add_parser(
        "serve",
        usage="python -m ostinato bench serve --url URL --model NAME (--rate R | --concurrency N) "
        "[options]",
        help="load on an OpenAI-compatible server",
        description="Send streams of random prompts to /v1/completions of any server, and show "
        "the times that its clients see: p50, p90, p99. With --rate requests come at random "
        "moments, whether earlier ones have ended or not. With two numbers of --output the time "
        "of a decode step is shown instead: of --concurrency texts that begin at once, the long "
        "ones less the short ones, as in bench engine. The key is that of OPENAI_API_KEY.",
    )
    serve.add_argument("--url", required=True, metavar="URL", help="such as http://localhost:8000")
    serve.add_argument("--model", required=True, metavar="NAME", help="that the server knows")
    serve.add_argument("--impl", default="ostinato", metavar="NAME", help="of the server, in rows")
    serve.add_argument("--requests", type=int, default=100, metavar="N", help="(default 100)")
    serve.add_argument("--rate", type=float, metavar="R", help="requests per second")
    serve.add_argument("--concurrency", type=int, metavar="N", help="requests in work, at most")
    serve.add_argument(
        "--prompt",
        type=int,
        nargs=2,
        default=[128, 2048],
        metavar=("LOW", "HIGH"),
        help="tokens of prompts, log-uniform (default 128 2048)",
    )
    serve.add_argument(
        "--output",
        type=int,
        nargs="+",
        default=[256],
        metavar="N",
        help="tokens of texts (default 256), or of short and of long ones",
    )
    serve.add_argument(
        "--lengths",
        type=Path,
        metavar="F",
        help="file with [prompt, output] tokens per line, instead of --prompt and --output",
    )
    serve.add_argument(
        "--vocab", type=int, default=32000, metavar="N", help="ids of prompts (default 32000)"
    )
    serve.add_argument(
        "--keep-eos",
        dest="ignore_eos",
        action="store_false",
        help="let texts end at an end-of-sequence token; for servers without ignore_eos",
    )
    serve.add_argument("--seed", type=int, default=0, metavar="S", help="of prompts and moments")
    serve.add_argument("--first-ms", type=float, metavar="MS", help="limit of the first token")
    serve.add_argument("--between-ms", type=float, metavar="MS", help="of the mean between tokens")
    serve.add_argument("--whole-ms", type=float, metavar="MS", help="of the whole request")
    serve.add_argument("--warm-up", type=int, default=4, metavar="N", help="untimed (default 4)")
    serve.add_argument(
        "--repeats", type=int, default=3, metavar="N", help="of short and long texts (default 3)"
    )
    serve.add_argument("--json", type=Path, metavar="F", help="write the results to this file")
    add_plot_flag(serve)
    serve.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    check_folder("--json", args.json)
    check_plot_flag(args.plot)

    from ...bench.serve.client import Server
    from ...bench.serve.row import Limits, ServeRow

    with user_errors(ValueError, OSError):
        outputs = _outputs(args)
        load = _load(args)
        server = Server(args.url, os.environ.get("OPENAI_API_KEY"))
    if outputs is not None:
        with user_errors(ValueError):
            step = _step(args, server, load, outputs)
        print(f"{step.case}, {step.impl}: {step.us} µs/step")
        _keep(args, step)
        return 0
    limits = Limits(args.first_ms, args.between_ms, args.whole_ms)
    streams, seconds = asyncio.run(_measure(server, load, args.warm_up))
    with user_errors(ValueError):
        row = ServeRow.of(_case(args), args.impl, streams, seconds, limits)
    print(_text(row))
    _keep(args, row)
    for error in {stream.error for stream in streams if stream.error is not None}:
        print(error, file=sys.stderr)
    return FAILED if row.failed else 0


def _keep(args: argparse.Namespace, row: ServeRow | StepRow) -> None:
    import torch

    from ...bench.report import Report

    report = Report.for_device(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    report.rows.append(row)
    if args.json is not None:
        with user_errors(OSError):
            report.write(args.json)
    plot(args.plot, "serve", report)


def _step(
    args: argparse.Namespace, server: Server, load: Load, outputs: tuple[int, int]
) -> StepRow:
    from tqdm import tqdm

    from ...bench.serve.step import StepRow, time_steps

    count = len(load.lengths) * (2 * args.repeats + 1)
    with tqdm(total=count, unit="request", file=sys.stderr) as progress:
        runs = asyncio.run(time_steps(server, load, outputs, args.repeats, progress.update))
    case = f"{args.model} b{args.concurrency} prompt{args.prompt[0]}"
    return StepRow.of(case, args.impl, outputs, runs)


def _outputs(args: argparse.Namespace) -> tuple[int, int] | None:
    """Return the tokens of short and of long texts, where steps are what is measured.

    Raises:
        ValueError: for flags that do not go together.
    """
    if len(args.output) == 1:
        return None
    if len(args.output) > 2 or not 0 < args.output[0] < args.output[1]:
        given = " ".join(map(str, args.output))
        raise ValueError(f"output: got {given}, expected one number, or a short and a long one")
    if args.concurrency is None or args.rate is not None or args.lengths is not None:
        raise ValueError("output: two numbers need --concurrency, and no --rate or --lengths")
    if args.prompt[0] != args.prompt[1]:
        low, high = args.prompt
        raise ValueError(f"prompt: got {low} to {high}, expected one length for steps")
    if args.repeats < 1:
        raise ValueError(f"repeats: got {args.repeats}, expected at least 1")
    args.requests = args.concurrency  # a batch
    return args.output[0], args.output[1]


async def _measure(server: Server, load: Load, warm_up: int) -> tuple[list[Stream], float]:
    from tqdm import tqdm

    from ...bench.serve.load import send_all

    if warm_up > 0:
        # Other prompts: none of the measured ones may be in the cache already.
        await send_all(server, replace(load, lengths=load.lengths[:warm_up], seed=load.seed + 1))
    with tqdm(total=len(load.lengths), unit="request", file=sys.stderr) as progress:
        return await send_all(server, load, on_end=progress.update)


def _load(args: argparse.Namespace) -> Load:
    from ...bench.serve.load import Load, log_uniform, read_lengths

    if args.lengths is None:
        low, high = args.prompt
        lengths = log_uniform(low, high, args.output[0], args.requests, args.seed)
    else:
        lengths = read_lengths(args.lengths, args.requests)
    return Load(
        model=args.model,
        lengths=lengths,
        rate=args.rate,
        concurrency=args.concurrency,
        vocab=args.vocab,
        ignore_eos=args.ignore_eos,
        seed=args.seed,
    )


def _case(args: argparse.Namespace) -> str:
    load = [] if args.rate is None else [f"rate{args.rate:g}"]
    load += [] if args.concurrency is None else [f"c{args.concurrency}"]
    low, high = args.prompt
    sizes = f"prompt{low}-{high} out{args.output[0]}" if args.lengths is None else args.lengths.stem
    return " ".join([args.model, *load, sizes])


def _text(row: ServeRow) -> str:
    lines = [
        f"{row.case}, {row.impl}: {row.requests} requests, {row.failed} failed, {row.seconds} s",
        f"{'output tokens/s':<24}{row.output_tokens_s:>12}",
        f"{'good requests/s':<24}{row.good_s:>12}",
        f"{'ms':<24}{'p50':>12}{'p90':>12}{'p99':>12}",
    ]
    for name, values in (
        ("first token", row.first_ms),
        ("between tokens", row.between_ms),
        ("whole request", row.whole_ms),
    ):
        lines.append(f"{name:<24}" + "".join(f"{value:>12}" for value in values))
    return "\n".join(lines)
