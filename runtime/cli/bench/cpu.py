"""`bench cpu`: a real model on the CPU, beside transformers."""

from __future__ import annotations

import argparse
import gc
import tempfile
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from ..command import Parser, check_folder, find_model, user_errors
from .picture import add_plot_flag, check_plot_flag, plot

if TYPE_CHECKING:
    import torch

    from ...bench.cpu.agreement import AgreementRow
    from ...bench.cpu.speed import SpeedRow
    from ...bench.report import Report
    from ...engine import Engine

_DTYPES = ("bf16", "fp32", "int8")
_PEERS = {"bf16": "bf16", "fp32": "fp32", "int8": "fp32"}  # transformers has no INT8 of this kind
_MAX_BATCH = 8


def add_parser(sections: argparse._SubParsersAction[Parser]) -> None:
    """Add the section to `bench`."""
    cpu = sections.add_parser(
        "cpu",
        usage="python -m ostinato bench cpu --model DIR [options]",
        help="a real model on the CPU, beside transformers",
        description="Time decode steps and a prompt of a checkpoint on the CPU, alternately with "
        "transformers in the same dtype (INT8: fp32). With --answers, compare greedy answers in "
        "bf16 with those of transformers in fp32 instead.",
    )
    cpu.add_argument("--model", type=Path, required=True, metavar="DIR", help="16-bit checkpoint")
    cpu.add_argument(
        "--dtype", choices=_DTYPES, nargs="+", default=["bf16"], help="of the weights (bf16)"
    )
    cpu.add_argument(
        "--batch", type=int, nargs="+", default=[1, 8], metavar="B", help="requests (default 1 8)"
    )
    cpu.add_argument(
        "--prompt", type=int, default=1000, metavar="N", help="tokens of the prompt (default 1000)"
    )
    cpu.add_argument(
        "--repeats", type=int, default=5, metavar="N", help="runs, the fastest counts (default 5)"
    )
    cpu.add_argument(
        "--answers", type=int, metavar="N", help="compare this many tokens of fifty answers"
    )
    cpu.add_argument("--json", type=Path, metavar="F", help="write the results to this file")
    add_plot_flag(cpu)
    cpu.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    check_folder("--json", args.json)
    check_plot_flag(args.plot)
    args.model = find_model("--model", args.model, "tokenizer.json")

    import torch

    from ...bench import machine
    from ...bench.report import Report

    report = Report.for_device(torch.device("cpu"))
    report.versions |= machine.package_versions("transformers")
    print(f"{report.gpu}, {torch.get_num_threads()} threads, commit {report.commit or 'unknown'}")
    with user_errors(OSError, ValueError, ImportError):
        if args.answers is None:
            _time(args, report)
        else:
            _compare(args, report)
    plot(args.plot, "cpu", report)
    return 0


def _time(args: argparse.Namespace, report: Report) -> None:
    from ...bench.cpu.peer import HuggingFace
    from ...bench.cpu.speed import SpeedPlan, time_beside

    plan = SpeedPlan(batches=args.batch, prompt=args.prompt, repeats=args.repeats)
    plan.check()
    for dtype in args.dtype:
        context = max(plan.prompt + 2, plan.context + plan.outputs[1] + 1)
        engine = _engine(args.model, dtype, max(plan.batches), context)
        peer = HuggingFace(args.model, _torch_dtype(_PEERS[dtype]))
        with closing(engine):
            for row in time_beside(engine, peer, plan, (dtype, _PEERS[dtype])):
                _keep(row, report, args.json)
        gc.collect()


def _compare(args: argparse.Namespace, report: Report) -> None:
    from ...bench.cpu.agreement import agreement, engine_answers, peer_answers
    from ...bench.cpu.peer import HuggingFace, chat_prompts
    from ...bench.cpu.questions import QUESTIONS

    prompts = chat_prompts(args.model, QUESTIONS)
    expected = peer_answers(HuggingFace(args.model, _torch_dtype("fp32")), prompts, args.answers)
    context = max(map(len, prompts)) + args.answers + 1
    theirs = None
    for dtype in args.dtype:
        if dtype != "int8":
            peer = HuggingFace(args.model, _torch_dtype(dtype))
            answers = peer_answers(peer, prompts, args.answers)
            theirs = agreement(f"transformers_{dtype}", answers, expected)
            _keep(theirs, report, args.json)
        with closing(_engine(args.model, dtype, _MAX_BATCH, context)) as engine:
            answers = engine_answers(engine, prompts, args.answers)
        _keep(agreement(f"ostinato_{dtype}", answers, expected, theirs), report, args.json)
        gc.collect()


def _engine(folder: Path, dtype: str, max_batch: int, context: int) -> Engine:
    from ...checkpoint import load_model, load_tokenizer
    from ...checkpoint.quantize import quantize_checkpoint
    from ...engine import Engine

    if dtype == "int8":
        with tempfile.TemporaryDirectory() as parent:
            target = Path(parent) / "int8"
            quantize_checkpoint(folder, target, scheme="int8", progress=False)
            model = load_model(target)
    else:
        model = load_model(folder, dtype=_torch_dtype(dtype))
    engine = Engine(model, load_tokenizer(folder), max_batch=max_batch, max_context=context)
    engine.capture(progress=False, verify=False)
    return engine


def _torch_dtype(name: str) -> torch.dtype:
    import torch

    return {"bf16": torch.bfloat16, "fp32": torch.float32}[name]


def _keep(row: SpeedRow | AgreementRow, report: Report, file: Path | None) -> None:
    """Print a row, and write all of them: what was measured before a Ctrl-C is worth keeping."""
    from ...bench.cpu.speed import SpeedRow

    if isinstance(row, SpeedRow):
        times = f"{row.us / 1e3:>10.2f} ms{row.peer_us / 1e3:>10.2f} ms"
        print(f"{row.case:<14}{row.impl:<16}{times}   ×{row.ratio} of {row.peer}", flush=True)
    else:
        ratio = "" if row.ratio is None else f"   ×{row.ratio}"
        print(f"{row.case:<24}{row.impl:<20}{row.mean:>8.2f} tokens{ratio}", flush=True)
    report.rows.append(row)
    if file is not None:
        report.write(file)
