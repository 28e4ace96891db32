"""`bench`: latencies, as a table and as the JSON document of `ostinato.bench.report`."""

from __future__ import annotations

from collections.abc import Sequence

from ..command import Command, Parser
from . import all_reduce, burst, cpu, decode, engine, gemm, graphs, moe, prefill, serve, step


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
    all_reduce.add_parser(sections)
    burst.add_parser(sections)
    cpu.add_parser(sections)
    decode.add_parser(sections)
    engine.add_parser(sections)
    gemm.add_parser(sections)
    graphs.add_parser(sections)
    moe.add_parser(sections)
    prefill.add_parser(sections)
    serve.add_parser(sections)
    step.add_parser(sections)
    return parser


COMMAND = Command("measure latencies", _main)
