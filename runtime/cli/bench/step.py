"""`bench step`: the decode step of a whole model."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from ...bench.shapes import HEAD_PRECISIONS, PRECISIONS, SHAPES, STEP_PEERS
from ..command import Parser, UserError, check_folder, find_model, user_errors
from ..device import add_device_flag, resolve_device
from ..model_flags import (
    add_batch_invariant_flag,
    add_kv_cache_flags,
    add_page_size_flag,
    kv_caches,
)
from .output import add_peers_flag
from .picture import add_plot_flag, check_matplotlib, check_plot_flag, plot

if TYPE_CHECKING:
    import torch

    from ...bench.step.run import StepPlan, StepResult
    from ...models import Decoder

_HEADER = (
    f"{'case':<32}{'impl':<36}{'µs':>12}{'tokens/s':>12}{'TB/s':>10}{'roofline µs':>13}{'of it':>8}"
)


def add_parser(sections: argparse._SubParsersAction[Parser]) -> None:
    """Add the section to `bench`."""
    step = sections.add_parser(
        "step",
        usage="python -m ostinato bench step (--model DIR | --shape NAME) [options]",
        help="one decode step of a whole model",
        description="Time the engine's captured decode step: inputs into the static buffers, "
        "replay, one token per sequence sampled. TB/s counts the weights and the KV cache "
        "read by a step. The roofline, where it is known for the GPU, is the sum of each kernel's "
        "shortest time to read them or to multiply.",
    )
    _add_flags(step)
    step.set_defaults(run=_run)


def _add_flags(parser: argparse.ArgumentParser) -> None:
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument(
        "--model", metavar="DIR", help="folder of a checkpoint, or its name on the Hub"
    )
    model.add_argument("--shape", choices=SHAPES, help="random weights of a model's shape")
    parser.add_argument(
        "--batch", type=int, nargs="+", default=[1], metavar="B", help="sequences (default 1)"
    )
    parser.add_argument(
        "--context",
        type=int,
        nargs="+",
        default=[512],
        metavar="N",
        help="tokens in the KV cache per sequence, this step's included (default 512)",
    )
    parser.add_argument(
        "--dtype",
        choices=PRECISIONS,
        nargs="+",
        help="of the linear layers' weights, with --shape (default int8)",
    )
    parser.add_argument(
        "--lm-head",
        choices=HEAD_PRECISIONS,
        help="precision of the output projection (default: bf16, or the checkpoint's own)",
    )
    add_batch_invariant_flag(parser)
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.0,
        metavar="T",
        help="of sampling (default 0: greedy)",
    )
    add_page_size_flag(parser)
    add_kv_cache_flags(parser, several=True)
    parser.add_argument(
        "--padded",
        type=int,
        default=0,
        metavar="B",
        help="time each batch in a graph of so many sequences, too, the others of it padding",
    )
    parser.add_argument(
        "--repeats", type=int, default=30, metavar="N", help="replays per median (default 30)"
    )
    parser.add_argument(
        "--breakdown",
        action="store_true",
        help="print what each kernel adds to the step, too (CUDA only)",
    )
    parser.add_argument(
        "--peer",
        choices=STEP_PEERS,
        nargs="+",
        default=[],
        help="time these in the same run, with --shape: transformers' Llama in bf16 with a static "
        "cache, as it is or compiled by torch",
    )
    add_peers_flag(parser)
    parser.add_argument(
        "--timeline",
        type=Path,
        metavar="DIR",
        help="draw each step there, a picture (.svg) of its kernels (CUDA only; needs matplotlib)",
    )
    parser.add_argument("--json", type=Path, metavar="F", help="write the results to this file")
    add_plot_flag(parser)
    add_device_flag(parser)


def _run(args: argparse.Namespace) -> int:
    if args.model is not None and args.dtype is not None:
        raise UserError("--dtype goes with --shape: a checkpoint has its own")
    if args.model is not None and args.peer:
        raise UserError("--peer goes with --shape: peers have random weights")
    if args.model is not None and args.lm_head == "bf16":
        raise UserError("--lm-head bf16 goes with --shape: a checkpoint has its own")
    if args.model is not None:
        args.folder = find_model("--model", args.model)
    check_folder("--json", args.json)
    check_plot_flag(args.plot)
    if args.timeline is not None:
        if not args.timeline.is_dir():
            raise UserError(f"--timeline: {args.timeline} is not a folder")
        check_matplotlib("--timeline")

    import torch

    from ...bench.harness.peers import adapter_folder, adapter_named
    from ...bench.harness.summary import compared_models
    from ...bench.report import Report
    from ...bench.step.run import StepPlan, StepRow

    traced = args.breakdown or args.timeline is not None
    plan = StepPlan(
        *(args.batch, args.context, args.page_size, args.repeats, args.temperature, traced),
        padded=args.padded,
    )
    plans = [
        replace(plan, kv_cache_dtype=dtype, kv_scales=scales) for dtype, scales in kv_caches(args)
    ]
    with user_errors(ValueError, OSError, MemoryError, torch.OutOfMemoryError):
        device = resolve_device(args.device)
        if traced and device.type != "cuda":
            flag = "--breakdown" if args.breakdown else "--timeline"
            raise UserError(f"{flag}: got device {device}, expected a CUDA device")
        models = _models(args, plans, device)
        with user_errors(ImportError):
            peers = None
            if args.peer:
                folder = adapter_folder(args.peers, os.environ)
                peers = adapter_named("hugging_face.py", folder)
                peers.check_peers(args.peer, args.shape)
    report = Report.for_device(device)
    print(f"{report.gpu}, commit {report.commit or 'unknown'}", _HEADER, sep="\n", flush=True)
    ours = _time_all(models, plans)
    theirs = peers.time_peers(args.peer, args.shape, device, plan) if peers is not None else ()
    with user_errors(OSError, MemoryError, torch.OutOfMemoryError):
        for result in chain(ours, theirs):
            if isinstance(result, str):
                print(result, flush=True)
                continue
            report.rows = compared_models([*report.rows, result.row])
            row = report.rows[-1]
            assert isinstance(row, StepRow)
            result = replace(result, row=row)
            report.rows += result.kernels
            print(_line(result), *_kernels(result), sep="\n", flush=True)
            if args.timeline is not None and result.run:
                _draw(args.timeline, result)
            # After every row: what was measured before a Ctrl-C is worth keeping.
            if args.json is not None:
                report.write(args.json)
    plot(args.plot, "step", report)
    return 0


def _time_all(
    models: Sequence[tuple[str, Callable[[], Decoder]]], plans: Sequence[StepPlan]
) -> Iterator[StepResult]:
    """Time the steps of one model after the other."""
    from ...bench.step.run import time_steps

    for name, make in models:
        model = make()
        for plan in plans:
            yield from time_steps(model, name, plan)
        del model  # two might not fit


def _models(
    args: argparse.Namespace, plans: Sequence[StepPlan], device: torch.device
) -> list[tuple[str, Callable[[], Decoder]]]:
    """Return the models' names and how to make them: one at a time, as two might not fit."""
    from ...bench.weights import dtype_named, random_decoder
    from ...checkpoint import load_config, load_model

    max_context = max(args.context)
    if args.model is not None:
        plans[0].check(load_config(args.folder))
        model = load_model(
            args.folder,
            device=device,
            max_context=max_context,
            lm_head_dtype=None if args.lm_head is None else dtype_named(args.lm_head),
            batch_invariant=args.batch_invariant,
        )
        for plan in plans:
            plan.cache_format(model)
        return [(Path(args.model).resolve().name, lambda: model)]
    from ...models import kv_format, read_config

    config = read_config(SHAPES[args.shape])
    plans[0].check(config)
    for plan in plans:
        kv_format(config, None, plan.kv_cache_dtype, plan.kv_scales)
    make = partial(
        random_decoder,
        config,
        device=device,
        max_context=max_context,
        lm_head=args.lm_head or "bf16",
        batch_invariant=args.batch_invariant,
    )
    return [(args.shape, partial(make, dtype)) for dtype in args.dtype or ["int8"]]


def _kernels(result: StepResult) -> list[str]:
    """Return a line for each kind of kernel, and what they take together."""
    from ...bench.step.breakdown import ATTENTION

    if not result.kernels:
        return []
    lines = []
    for kernel in result.kernels:
        line = (
            f"  {kernel.us:9.1f} µs{kernel.share:7.1%}  {kernel.launches:4} x {kernel.kernel:<28}"
            f"runs{kernel.running_us / kernel.launches:8.2f} µs"
        )
        if kernel.floor_us is not None:
            line += f", roofline{kernel.floor_us / kernel.launches:8.2f} µs, {kernel.tb_s:.3g} TB/s"
        lines.append(line)
    total = sum(kernel.us for kernel in result.kernels)
    count = sum(kernel.launches for kernel in result.kernels)
    roofline = result.row.floor_us
    known = "" if roofline is None else f", their rooflines {roofline:.1f} µs"
    layers = next((kernel.launches for kernel in result.kernels if kernel.kernel == ATTENTION), 0)
    per_layer = ""
    if layers > 1:
        each = sum(kernel.launches // layers for kernel in result.kernels)
        per_layer = f", {each} a layer"
    return [*lines, f"  {total:9.1f} µs in {count} kernels and copies{per_layer}{known}"]


def _draw(folder: Path, result: StepResult) -> None:
    from ...bench.step.timeline import draw_timeline

    row = result.row
    name = f"{row.case} {row.impl}"
    title = f"{name}: {row.us:.0f} µs a step, {len(result.run)} kernels and copies (traced)"
    draw_timeline(folder / f"{name.replace(' ', '-')}.svg", title, result.run, result.sites)


def _line(result: StepResult) -> str:
    row = result.row
    line = (
        f"{row.case:<32}{row.impl:<36}{row.us:>12.1f}{result.tokens_per_s:>12.4g}{row.tb_s:>10.3g}"
    )
    if row.floor_us is not None:
        line += f"{row.floor_us:>13.1f}{row.floor_us / row.us:>8.1%}"
    return line if row.ratio is None else f"{line}   ×{row.ratio:.3f} of {row.peer}"
