"""`quantize`: a checkpoint with 8-bit weights from one with 16- or 32-bit weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from .command import Command, Parser, as_utf8, find_model, user_errors

_SCHEMES = ("int8", "int8-asymmetric", "fp8", "fp8-block")


def _parser() -> Parser:
    parser = Parser(
        prog="ostinato quantize",
        usage="python -m ostinato quantize SRC DST "
        "--scheme {int8,int8-asymmetric,fp8,fp8-block} [--ignore NAME ...] [--calibrate FILE]",
        description="Write an 8-bit checkpoint in compressed-tensors format: weights scaled per "
        "output channel and activations quantised per token at run time, with "
        "int8-asymmetric by a zero point as well, or, with fp8-block, in blocks of 128 by 128 and "
        "groups of 128.",
    )
    parser.add_argument(
        "source",
        metavar="SRC",
        help="folder of a checkpoint in bf16, fp16, fp32, or its name on the Hub",
    )
    parser.add_argument("destination", metavar="DST", help="folder to write; must not exist")
    parser.add_argument("--scheme", choices=_SCHEMES, required=True, help="type of weights")
    parser.add_argument(
        "--ignore",
        action="append",
        type=as_utf8,
        metavar="NAME",
        help="leave this module as it is: a full name, or re: and a regular expression; may be "
        "repeated (default: lm_head)",
    )
    parser.add_argument(
        "--calibrate",
        type=Path,
        metavar="FILE",
        help="for INT8: a text (UTF-8) to run through the model first; large input columns are "
        "then scaled down, and norms and layers in front up (SmoothQuant)",
    )
    return parser


def _main(argv: Sequence[str]) -> int:
    args = _parser().parse_args(argv)
    args.source = find_model("SRC", args.source)
    from ..checkpoint import quantize_checkpoint
    from ..checkpoint.reader import CheckpointReader

    def weights_mib(folder: Path) -> float:
        with CheckpointReader(folder) as reader:
            return sum(file.stat().st_size for file in reader.files) / 2**20

    ignore = ("lm_head",) if args.ignore is None else tuple(args.ignore)
    with user_errors():
        quantize_checkpoint(
            args.source,
            args.destination,
            scheme=args.scheme,
            ignore=ignore,
            calibrate=args.calibrate,
        )
    before, after = weights_mib(args.source), weights_mib(Path(args.destination))
    print(f"{args.destination}: {args.scheme} weights, {after:.2f} MiB (before: {before:.2f} MiB)")
    return 0


COMMAND = Command("write a checkpoint with 8-bit weights", _main)
