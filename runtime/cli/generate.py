"""`generate`: prompts in, text out, with the latencies of getting there."""

from __future__ import annotations

import argparse
import json
import secrets
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .command import FAILED, Command, Parser, UserError, find_model, user_errors
from .display import TextDisplay
from .engine import add_engine_flags, follow_engine, make_engine
from .interrupt import INTERRUPTED, deferred_interrupt
from .prompts import read_prompts
from .ranks import ranks_of
from .sampling import add_sampling_flags, sampling_params
from .summary import Summary

if TYPE_CHECKING:
    from ostinato.graphs import CaptureReport

    from ..engine import Completion, Engine, SamplingParams
    from ..parallel import Ranks

_EPILOG = """\
Texts go to standard output, everything else to standard error. One text is written token by
token; of several, each stands under a header, in the order of the prompts: the first unfinished
one grows token by token, and the others appear when their turn comes. Ctrl-C ends all texts where
they are; they are still shown, and the exit code is 130. A text ends where the model's logits are
NaN; then the exit code is 1.
"""


@dataclass(frozen=True)
class _Served:
    completions: list[Completion]
    summary: Summary
    interrupted: bool


def _main(argv: Sequence[str]) -> int:
    # Intermixed, so that prompts may stand on either side of the options.
    args = _parser().parse_intermixed_args(argv)
    with ranks_of(args) as ranks:
        folder = find_model("MODEL", args.model, "tokenizer.json")
        if ranks is None or ranks.leads:
            return _generate(args, folder, ranks)
        with user_errors():
            follow_engine(args, folder, ranks)
        return 0


def _generate(args: argparse.Namespace, folder: Path, ranks: Ranks | None) -> int:
    prompts = read_prompts(args.prompts, args.prompts_file)
    with user_errors():
        params = _params_each(sampling_params(args), len(prompts))
        engine, tokens = make_engine(args, folder, prompts, params[0], ranks)
        # Before the capture, so that a prompt that cannot be served is refused at once.
        ids = _submit(engine, tokens, params)
        report = engine.capture(args.batch_sizes, verify=args.verify)
    display = None
    if not args.json:
        print(report, end="\n\n", file=sys.stderr, flush=True)
        display = TextDisplay(prompts, sys.stdout)
    with closing(engine):
        served = _serve(engine, ids, display)
    if args.json:
        print(json.dumps(_document(args, engine, prompts, report, served), indent=2))
    else:
        seed = f"\nseed      {params[0].seed}" if params[0].temperature > 0 else ""
        print(f"\n{served.summary}{seed}", file=sys.stderr)
    if served.interrupted:
        return INTERRUPTED
    failed = [
        number
        for number, completion in enumerate(served.completions, start=1)
        if completion.finish_reason == "error"
    ]
    if failed:
        numbers = ", ".join(map(str, failed))
        print(f"prompt {numbers}: the model's logits are NaN, where the text ends", file=sys.stderr)
        return FAILED
    return 0


def _parser() -> Parser:
    parser = Parser(
        prog="ostinato generate",
        usage="python -m ostinato generate MODEL [PROMPT ...] [options]",
        description="Turn prompts into text, all of them at once.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="folder of a Hugging Face checkpoint, or its name on the Hub",
    )
    parser.add_argument(
        "prompts",
        nargs="*",
        default=[],
        metavar="PROMPT",
        help="texts to continue; - reads them from standard input, one per line, "
        "as does giving none when that is not a terminal",
    )
    parser.add_argument(
        "--prompts-file",
        metavar="F",
        help="file with one prompt per line, blank lines skipped (- for standard input)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document instead")
    add_sampling_flags(parser)
    add_engine_flags(parser)
    return parser


def _params_each(params: SamplingParams, count: int) -> list[SamplingParams]:
    """Return one set per prompt, with seeds that follow each other."""
    # Equal seeds would give equal prompts equal texts. 32 bits: short enough to type again.
    first = secrets.randbits(32) if params.seed is None else params.seed
    return [replace(params, seed=first + index) for index in range(count)]


def _submit(
    engine: Engine, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
) -> list[int]:
    ids = []
    for number, (prompt, wanted) in enumerate(zip(prompts, params, strict=True), start=1):
        try:
            ids.append(engine.submit(prompt, wanted))
        except ValueError as error:
            raise UserError(f"prompt {number}: {error}") from error
    return ids


def _serve(engine: Engine, ids: Sequence[int], display: TextDisplay | None) -> _Served:
    """Step until all requests have finished or Ctrl-C is pressed, showing their texts."""
    started = time.perf_counter()
    index = {request_id: at for at, request_id in enumerate(ids)}
    unfinished = set(ids)
    with deferred_interrupt() as interrupted:
        while unfinished and not interrupted():
            for event in engine.step():
                finished = event.finish_reason is not None
                if finished:
                    unfinished.remove(event.request_id)
                if display is not None:
                    display.add(index[event.request_id], event.text, finished=finished)
    for request_id in sorted(unfinished):
        held_back = engine.cancel(request_id).text
        if display is not None:
            display.add(index[request_id], held_back, finished=False)
    if unfinished and display is not None:
        display.cut_short()
    completions = [engine.result(request_id) for request_id in ids]
    summary = Summary.of(
        engine.stats,
        engine.runner.stats(),
        seconds=time.perf_counter() - started,
        tokens=sum(len(completion.token_ids) for completion in completions),
    )
    return _Served(completions, summary, interrupted())


def _document(
    args: argparse.Namespace,
    engine: Engine,
    prompts: Sequence[str],
    report: CaptureReport,
    served: _Served,
) -> dict[str, Any]:
    from ..bench import machine

    completions = [
        {
            "prompt": prompt,
            "prompt_tokens": completion.prompt_tokens,
            "text": completion.text,
            "token_ids": completion.token_ids,
            "finish_reason": completion.finish_reason.value,
            "seed": completion.seed,
        }
        for prompt, completion in zip(prompts, served.completions, strict=True)
    ]
    return {
        # Of a locale that cannot decode it Python makes lone surrogates.
        "model": args.model.encode(errors="surrogateescape").decode(errors="replace"),
        "device": str(engine.model.device),
        "versions": machine.versions(),
        "capture": asdict(report),
        "completions": completions,
        "latencies": served.summary.to_dict(),
        "interrupted": served.interrupted,
    }


COMMAND = Command("turn prompts into text", _main)
