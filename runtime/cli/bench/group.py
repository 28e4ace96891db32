"""`bench`: latencies, as a table and as the JSON document of `ostinato.bench.report`."""

from __future__ import annotations

from collections.abc import Sequence

from ostinato.cli import (
    bench_burst,
    bench_decode,
    bench_engine,
    bench_gemm,
    bench_graphs,
    bench_prefill,
    bench_step,
)
from ostinato.cli.command import Command, Parser


def _main(argv: Sequence[str]) -> int:
    args = _parser().parse_args(argv)
    code: int = args.run(args)
    return code


def _parser() -> Parser:
    parser = Parser(
        prog="ostinato bench",
        usage="python -m ostinato bench SECTION ...",
        description="Measure latencies. `bench SECTION --help` describes a section.",
    )
    sections = parser.add_subparsers(title="sections", metavar="SECTION", required=True)
    bench_burst.add_parser(sections)
    bench_decode.add_parser(sections)
    bench_engine.add_parser(sections)
    bench_gemm.add_parser(sections)
    bench_graphs.add_parser(sections)
    bench_prefill.add_parser(sections)
    bench_step.add_parser(sections)
    return parser


COMMAND = Command("measure latencies", _main)
