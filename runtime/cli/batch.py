"""`run-batch`: a file of requests in, a file of answers out."""

from __future__ import annotations

import argparse
import asyncio
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from .command import FAILED, Command, Parser, UserError, check_folder, user_errors
from .served_model import add_served_model_flags, run_served, service_of

if TYPE_CHECKING:
    from ..parallel import Ranks

_EPILOG = """\
Each line of the input is a request of OpenAI's batch API:
  {"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a"}}
Answers are written in the order of the requests. If the output exists already, the requests that it
answers are passed over, so that an interrupted run goes on. The exit code is 1 when a request was
refused or has failed.
"""
_TIMEOUT = 7 * 24 * 3600.0  # seconds; nobody waits at the other end


def _main(argv: Sequence[str]) -> int:
    return run_served(_parser().parse_args(argv), _run)


def _run(args: argparse.Namespace, folder: Path, ranks: Ranks | None) -> int:
    check_folder("--output-file", args.output_file)
    from tqdm import tqdm

    from ..server import Settings
    from ..server.batch import BatchError, finished_lines, read_lines, run_batch

    settings = Settings(request_timeout=_TIMEOUT, max_queue=1 << 20, max_body_bytes=64 << 20)
    with ExitStack() as files:
        with user_errors(ValueError, OSError):
            requests = files.enter_context(_opened(args.input_file))
            total = sum(1 for _ in read_lines(requests))
            if not total:
                raise UserError(f"--input-file: {args.input_file} holds no requests")
            _check_output(args.output_file, args.input_file)
            requests.seek(0)
            done = finished_lines(requests, args.output_file) if args.output_file.exists() else 0
            answers = files.enter_context(open(args.output_file, "a", encoding="utf-8"))
        requests.seek(0)
        service = service_of(args, folder, settings, ranks)
        files.callback(service.close)
        with tqdm(total=total, initial=done, unit="request", file=sys.stderr) as progress:

            def write(line: str) -> None:
                answers.write(line + "\n")
                answers.flush()
                progress.update()

            lines = islice(read_lines(requests), done, None)
            at_once = 2 * service.max_batch
            with user_errors(BatchError):
                failed = asyncio.run(run_batch(service, lines, write, at_once=at_once))
    if failed:
        print(f"{failed} of {total} requests were refused or have failed", file=sys.stderr)
    return FAILED if failed else 0


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    """Open a file for reading it several times; of a pipe, such as /dev/stdin, a copy."""
    with open(path, "rb") as file:
        if file.seekable():
            yield file
            return
        with tempfile.TemporaryFile() as copy:
            shutil.copyfileobj(file, copy)
            copy.seek(0)
            yield copy


def _check_output(output: Path, requests: Path) -> None:
    """Refuse to write answers over requests, or into what cannot be read and continued."""
    if not output.exists():
        return
    if output.samefile(requests):
        raise UserError(f"--output-file: got {output}, which is the --input-file")
    if not stat.S_ISREG(output.stat().st_mode):
        raise UserError(f"--output-file: got {output}, expected a file or a name that is free")


def _parser() -> Parser:
    parser = Parser(
        prog="ostinato run-batch",
        usage="python -m ostinato run-batch MODEL -i IN.jsonl -o OUT.jsonl [options]",
        description="Answer a file of requests.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_served_model_flags(parser)
    parser.add_argument(
        *("-i", "--input-file"), type=Path, required=True, metavar="F", help="requests, one a line"
    )
    parser.add_argument(
        *("-o", "--output-file"), type=Path, required=True, metavar="F", help="answers, one a line"
    )
    return parser


COMMAND = Command("answer a file of requests", _main)
