"""`bench graphs`: what the graph manager itself costs."""

from __future__ import annotations

import argparse
import gc
from pathlib import Path

from ...bench.shapes import PRECISIONS, SHAPES
from ..command import Parser, UserError, check_folder, user_errors
from ..device import add_device_flag, resolve_device
from .picture import add_plot_flag, check_plot_flag, plot

_STEPS = ("ostinato", "transformers", "transformers_sdpa")


def add_parser(sections: argparse._SubParsersAction[Parser]) -> None:
    """Add the section to `bench`."""
    graphs = sections.add_parser(
        "graphs",
        usage="python -m ostinato bench graphs [options]",
        help="what the graph manager costs",
        description="Capture a model's decode step, of random weights: seconds and memory of 35 "
        "graphs and of the default ones, the host's time per run, allocations, and replays of "
        "padded batches against graphs of their exact size.",
    )
    graphs.add_argument(
        "--shape", choices=SHAPES, default="llama-3.1-8b", help="model (default llama-3.1-8b)"
    )
    graphs.add_argument(
        "--dtype", choices=PRECISIONS, default="int8", help="of our linear layers (default int8)"
    )
    graphs.add_argument(
        "--step",
        choices=_STEPS,
        nargs="+",
        default=["ostinato"],
        help="whose decode step: the engine's, or transformers' Llama in bf16 with a static cache, "
        "which attends by our attention or by torch's",
    )
    graphs.add_argument(
        "--max-batch", type=int, default=256, metavar="B", help="largest batch (default 256)"
    )
    graphs.add_argument(
        "--context",
        type=int,
        default=512,
        metavar="N",
        help="tokens in the KV cache per sequence, this step's included (default 512)",
    )
    graphs.add_argument("--json", type=Path, metavar="F", help="write the results to this file")
    add_plot_flag(graphs)
    add_device_flag(graphs)
    graphs.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    check_folder("--json", args.json)
    check_plot_flag(args.plot)
    for name in ("max_batch", "context"):
        if getattr(args, name) < 1:
            flag = name.replace("_", "-")
            raise UserError(f"--{flag}: got {getattr(args, name)}, expected at least 1")

    import torch

    from ...bench.graphs.hugging_face import Attention
    from ...bench.graphs.run import measure
    from ...bench.graphs.subjects import hugging_face_step, our_step
    from ...bench.report import Report
    from ...models.l2.partitioned_memory import free_unused

    with user_errors(ValueError):
        device = resolve_device(args.device)
    if device.type != "cuda":
        raise UserError("bench graphs: a CPU has no graphs to measure; give --device cuda")
    report = Report.for_device(device)
    print(f"{report.gpu}, commit {report.commit or 'unknown'}", flush=True)
    sizes = {"max_batch": args.max_batch, "context": args.context}
    with user_errors(ValueError, OSError, ImportError, MemoryError, torch.OutOfMemoryError):
        for step in args.step:
            if step == "ostinato":
                subject = our_step(args.shape, args.dtype, device, **sizes)
            else:
                attention: Attention = "sdpa" if step == "transformers_sdpa" else "ostinato"
                subject = hugging_face_step(args.shape, device, attention=attention, **sizes)
            for figure in measure(subject):
                print(figure, flush=True)
                report.rows.append(figure)
                # After every row: what was measured before a Ctrl-C is worth keeping.
                if args.json is not None:
                    report.write(args.json)
            del subject
            gc.collect()  # steps and runners refer to each other
            free_unused()
            torch.cuda.empty_cache()
    plot(args.plot, "graphs", report)
    return 0
