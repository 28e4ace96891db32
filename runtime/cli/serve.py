"""`serve`: an OpenAI-compatible HTTP server, captured before it listens."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .command import FAILED, Command, Parser, UserError, user_errors
from .served_model import (
    add_served_model_flags,
    engine_of,
    engine_options,
    run_served,
    served_model_of,
)

if TYPE_CHECKING:
    from ..parallel import Ranks
    from ..server import Settings

_EPILOG = """\
The model is loaded and captured, and only then clients are answered. SIGTERM and Ctrl-C let running
requests end, for --drain-timeout seconds. Standard error has the capture's table, then the log, one
JSON object per line. docs/server.md describes the API.
"""
_KEY = "OSTINATO_API_KEY"


def _main(argv: Sequence[str]) -> int:
    return run_served(_parser().parse_args(argv), _serve)


def _serve(args: argparse.Namespace, folder: Path, ranks: Ranks | None) -> int:
    from ..server import bind, log_to
    from ..server.http_process import HttpProcess

    with user_errors():
        settings = _settings(args)
        try:
            bound = bind(settings.host, settings.port)
        except OSError as error:
            where = f"--host, --port: got {settings.host}, {settings.port}"
            raise UserError(f"{where}: {error.strerror}") from error
    options = engine_options(args, ranks)
    with user_errors():
        http = HttpProcess(bound, served_model_of(args, folder), settings)
    with http:
        engine, limits = engine_of(folder, options)
        log_to(sys.stderr)
        return 0 if http.serve(engine, limits) else FAILED


def _settings(args: argparse.Namespace) -> Settings:
    from ..server import Settings

    keys = tuple(args.api_key or filter(None, [os.environ.get(_KEY)]))
    return Settings(
        host=args.host,
        port=args.port,
        api_keys=keys,
        max_queue=args.max_queue,
        request_timeout=args.request_timeout,
        drain_timeout=args.drain_timeout,
        max_body_bytes=args.max_body_bytes,
        max_connections=args.max_connections,
    )


def _parser() -> Parser:
    parser = Parser(
        prog="ostinato serve",
        usage="python -m ostinato serve MODEL [options]",
        description="Serve a model over HTTP, with OpenAI's API.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_served_model_flags(parser)
    group = parser.add_argument_group("server")
    group.add_argument(
        "--host", default="127.0.0.1", metavar="H", help="address (default 127.0.0.1)"
    )
    group.add_argument("--port", type=int, default=8000, metavar="P", help="port (default 8000)")
    group.add_argument(
        "--api-key",
        action="append",
        metavar="K",
        help=f"key that requests need; may be repeated (default: {_KEY}, or none is needed)",
    )
    group.add_argument(
        "--max-queue",
        type=int,
        default=1024,
        metavar="N",
        help="texts that may wait; more are answered with 429 (default 1024)",
    )
    group.add_argument(
        "--max-connections",
        type=int,
        default=4096,
        metavar="N",
        help="open at once (default 4096)",
    )
    group.add_argument(
        "--max-body-bytes",
        type=int,
        default=8 << 20,
        metavar="N",
        help="of a request (default 8388608)",
    )
    group.add_argument(
        "--request-timeout",
        type=float,
        default=600.0,
        metavar="S",
        help="seconds from a request to the end of its answer (default 600)",
    )
    group.add_argument(
        "--drain-timeout",
        type=float,
        default=30.0,
        metavar="S",
        help="seconds for running requests to end after SIGTERM (default 30)",
    )
    return parser


COMMAND = Command("serve a model over HTTP, with OpenAI's API", _main)
