"""`bench engine`: decode steps of the whole engine, with scheduling and host work."""

from __future__ import annotations

import argparse
import gc
import json
import time
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

from ...bench.shapes import HEAD_PRECISIONS, PRECISIONS, SHAPES
from ..command import Parser, UserError, check_folder, user_errors
from ..device import add_device_flag
from ..model_flags import (
    add_batch_invariant_flag,
    add_kv_cache_flags,
    add_page_size_flag,
    kv_caches,
)
from ..ranks import add_rank_flags, communicator_of, device_of, ranks_of
from .output import add_targets_flag
from .picture import add_plot_flag, check_plot_flag, plot

if TYPE_CHECKING:
    import torch

    from ...bench.engine import EnginePlan, EngineRow, FirstTokenRow, StartUp
    from ...bench.report import Report
    from ...models import ModelConfig
    from ...parallel import Ranks

_HEADER = f"{'case':<32}{'impl':<36}{'µs/step':>12}{'tokens/s':>12}{'TB/s':>10}"
_HEADER += f"{'short texts, s':>18}{'long texts, s':>18}"


def add_parser(sections: argparse._SubParsersAction[Parser]) -> None:
    """Add the section to `bench`."""
    engine = sections.add_parser(
        "engine",
        usage="python -m ostinato bench engine --shape NAME [options]",
        help="the whole engine, host work included",
        description="Time Engine.generate with batches of random prompts: the time of a long text "
        "less that of a short one, per token. The time to the first tokens and what starting up "
        "takes are shown, too.",
    )
    engine.add_argument(
        "--shape", choices=SHAPES, required=True, help="random weights of a model's shape"
    )
    engine.add_argument(
        "--batch", type=int, nargs="+", default=[1], metavar="B", help="requests (default 1)"
    )
    engine.add_argument(
        "--dtype",
        choices=PRECISIONS,
        nargs="+",
        default=["int8"],
        help="of the linear layers' weights (default int8)",
    )
    engine.add_argument(
        "--lm-head",
        choices=HEAD_PRECISIONS,
        default="bf16",
        help="precision of the output projection (default bf16)",
    )
    add_batch_invariant_flag(engine)
    engine.add_argument(
        "--prompt", type=int, default=128, metavar="N", help="tokens per prompt (default 128)"
    )
    engine.add_argument(
        "--output",
        type=int,
        nargs=2,
        default=[32, 288],
        metavar=("SHORT", "LONG"),
        help="tokens of the two texts (default 32 288)",
    )
    engine.add_argument(
        "--cached-prompts",
        action="store_true",
        help="send the same prompts again, which the KV cache keeps: for steps of long contexts",
    )
    add_page_size_flag(engine)
    add_kv_cache_flags(engine, several=True)
    engine.add_argument(
        "--cache-gib",
        type=float,
        metavar="GIB",
        help="of the KV cache; requests are preempted when it is full (default: room for all)",
    )
    engine.add_argument(
        "--repeats", type=int, default=3, metavar="N", help="runs of each length (default 3)"
    )
    engine.add_argument("--json", type=Path, metavar="F", help="write the results to this file")
    add_plot_flag(engine)
    add_targets_flag(engine)
    add_device_flag(engine)
    add_rank_flags(engine)
    engine.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    check_folder("--json", args.json)
    check_plot_flag(args.plot)

    with ranks_of(args) as ranks:
        return _bench(args, ranks)


def _bench(args: argparse.Namespace, ranks: Ranks | None) -> int:
    import torch

    from ...bench.engine import EnginePlan, TooShortError
    from ...bench.report import Report
    from ...models import kv_format, read_config
    from ...models.l2.partitioned_memory import free_unused

    plan = EnginePlan(
        *(args.batch, args.prompt, tuple(args.output), args.page_size, args.repeats),
        cached_prompts=args.cached_prompts,
        cache_gib=args.cache_gib,
    )
    caches = kv_caches(args)
    config = read_config(SHAPES[args.shape])
    with user_errors(ValueError):
        device = device_of(args)
        plan.check(config)
        for stored, scales in caches:
            kv_format(config, None, stored, scales)
    targets = {} if args.targets is None else _targets(args.targets)
    report = Report.for_device(device)
    leads = ranks is None or ranks.leads
    if leads:
        print(f"{report.gpu}, commit {report.commit or 'unknown'}", _HEADER, sep="\n", flush=True)
    with user_errors(OSError, MemoryError, TooShortError, torch.OutOfMemoryError):
        for dtype, (stored, scales) in product(args.dtype, caches):
            each = replace(plan, kv_cache_dtype=stored, kv_scales=scales)
            _measure(args, each, config, dtype, device, report, targets, ranks)
            gc.collect()  # steps and runners refer to each other
            free_unused()
    if leads:
        plot(args.plot, "engine", report)
    return 0


def _measure(
    args: argparse.Namespace,
    plan: EnginePlan,
    config: ModelConfig,
    dtype: str,
    device: torch.device,
    report: Report,
    targets: dict[tuple[str, str], float],
    ranks: Ranks | None,
) -> None:
    from ...bench.engine import EngineRow, FirstTokenRow, StartUp, engine_for, time_engine
    from ...bench.step.run import implementation
    from ...bench.weights import random_decoder
    from ...models import compile_kernels, kv_format

    name = args.shape if ranks is None else f"{args.shape} tp{ranks.size}"
    began = time.perf_counter()
    model = random_decoder(
        config,
        dtype,
        device,
        max_context=plan.context,
        lm_head=args.lm_head,
        batch_invariant=args.batch_invariant,
        communicator=communicator_of(ranks, device),
    )
    loaded = time.perf_counter()
    stored = kv_format(model.config, model.kv_scales, plan.kv_cache_dtype, plan.kv_scales)
    compile_kernels(model, stored)
    compiled = time.perf_counter()
    engine = engine_for(model, plan, ranks)
    made = time.perf_counter()
    if ranks is not None and not ranks.leads:
        engine.follow()
        return
    try:
        captured = engine.capture(sorted(set(plan.batches)))
        start_up = StartUp.of(
            name,
            implementation(model, stored),
            load_s=loaded - began,
            compile_s=compiled - loaded,
            engine_s=made - compiled,
            report=captured,
        )
        print(start_up, flush=True)
        _keep(start_up, report, args.json)
        for row in time_engine(engine, name, plan):
            _keep(row, report, args.json)
            kept = report.rows[-1]
            assert isinstance(kept, EngineRow | FirstTokenRow)
            line = _line(kept, targets) if isinstance(kept, EngineRow) else _first_token_line(kept)
            print(line, flush=True)
    finally:
        engine.close()


def _first_token_line(row: FirstTokenRow) -> str:
    texts = f"{min(row.texts_s):.4f} to {max(row.texts_s):.4f} s"
    line = f"{row.case:<32}{row.impl:<36}{row.us:>12.1f} µs to every first token, {texts}"
    return line if row.ratio is None else f"{line}   ×{row.ratio:.3f} of {row.peer}"


def _keep(row: EngineRow | FirstTokenRow | StartUp, report: Report, file: Path | None) -> None:
    """Add a row, and write all of them: what was measured before a Ctrl-C is worth keeping."""
    from ...bench.harness.summary import compared_models

    report.rows = compared_models([*report.rows, row])
    if file is not None:
        report.write(file)


def _targets(path: Path) -> dict[tuple[str, str], float]:
    """Return the microseconds of the engines in a file of published times, by case and dtype."""
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
        return {
            (row["case"], row["impl"].rpartition("_")[2]): float(row["us"])
            for row in rows
            if row["section"] == "engine"
        }
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"--targets {path}: not a document of engines' times: {error!r}") from error


def _line(row: EngineRow, targets: dict[tuple[str, str], float]) -> str:
    # Behind the shape, and perhaps the number of ranks.
    batch = int(row.case.partition(" prompt")[0].split()[-1].removeprefix("b"))
    line = f"{row.case:<32}{row.impl:<36}{row.us:>12.1f}{batch / row.us * 1e6:>12.4g}"
    line += f"{row.tb_s:>10.3g}"
    for seconds in (row.short_s, row.long_s):
        line += f"{f'{min(seconds):.3f} to {max(seconds):.3f}':>18}"
    line += f"   {row.pages} pages"
    if row.preemptions:
        line += f", {row.preemptions} preemptions"
    if row.ratio is not None:
        line += f"   ×{row.ratio:.3f} of {row.peer}"
    theirs = targets.get((row.case, row.impl.split("_")[1]))  # ostinato_int8_...
    return line if theirs is None else f"{line}   ×{row.us / theirs:.3f} of {theirs:.0f}"
