"""`quantize`: a checkpoint with 8-bit weights, or of an 8-bit KV cache, from a plain one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from .command import (
    NO_MORE_IS_WRITTEN,
    Command,
    Parser,
    UserError,
    as_utf8,
    find_model,
    user_errors,
)
from .device import add_device_flag, resolve_device

_SCHEMES = ("int8", "int8-asymmetric", "fp8", "fp8-block")
_KV_CACHES = ("fp8", "int8")


def _parser() -> Parser:
    parser = Parser(
        prog="ostinato quantize",
        usage="python -m ostinato quantize SRC DST "
        "[--scheme {int8,int8-asymmetric,fp8,fp8-block}] [--ignore NAME ...] [--lm-head] "
        "[--kv-cache {fp8,int8}] [--calibrate FILE] [--device D]",
        description="Write an 8-bit checkpoint in compressed-tensors format: weights scaled per "
        "output channel and activations quantised per token at run time, with "
        "int8-asymmetric by a zero point as well, or, with fp8-block, in blocks of 128 by 128 and "
        "groups of 128. With --kv-cache it has scales of an 8-bit KV cache, too, or without "
        "--scheme alone.",
    )
    parser.add_argument(
        "source",
        metavar="SRC",
        help="folder of a checkpoint in bf16, fp16, fp32, or its name on the Hub",
    )
    parser.add_argument("destination", metavar="DST", help="folder to write; must not exist")
    parser.add_argument("--scheme", choices=_SCHEMES, help="type of weights")
    parser.add_argument(
        "--ignore",
        action="append",
        type=as_utf8,
        metavar="NAME",
        default=[],
        help="leave this module as it is, as the output projection: a full name, or re: and a "
        "regular expression; may be repeated",
    )
    parser.add_argument(
        "--lm-head", action="store_true", help="quantise the output projection, too"
    )
    parser.add_argument(
        "--kv-cache",
        choices=_KV_CACHES,
        help="type of an 8-bit KV cache, with a scale per layer of keys and of values",
    )
    parser.add_argument(
        "--calibrate",
        type=Path,
        metavar="FILE",
        help="a text (UTF-8) to run through the model first: with --kv-cache for the scales of "
        "keys and values; with INT8 weights large input columns are scaled down, too, and norms "
        "and layers in front up (SmoothQuant)",
    )
    add_device_flag(parser)
    return parser


def _main(argv: Sequence[str]) -> int:
    args = _parser().parse_args(argv)
    args.source = find_model("SRC", args.source)
    from ..checkpoint import quantize_checkpoint
    from ..checkpoint.reader import CheckpointReader

    def weights_mib(folder: Path) -> float:
        with CheckpointReader(folder) as reader:
            return sum(file.stat().st_size for file in reader.files) / 2**20

    if args.scheme is None and args.kv_cache is None:
        raise UserError("got neither --scheme nor --kv-cache, expected one of them or both")
    if args.scheme is None and (args.ignore or args.lm_head):
        raise UserError(f"{'--ignore' if args.ignore else '--lm-head'} goes with --scheme")
    if args.kv_cache is not None and args.calibrate is None:
        raise UserError("--kv-cache needs --calibrate")
    head = () if args.lm_head else ("lm_head",)
    try:
        with user_errors():
            quantize_checkpoint(
                args.source,
                args.destination,
                scheme=args.scheme,
                ignore=list(dict.fromkeys((*head, *args.ignore))),
                kv_cache=args.kv_cache,
                calibrate=args.calibrate,
                device="cpu" if args.calibrate is None else resolve_device(args.device),
            )
    except UserError as error:
        cause = error.__cause__
        if isinstance(cause, OSError) and cause.errno in NO_MORE_IS_WRITTEN:
            raise cause from None  # no fault of what was asked for
        raise
    before, after = weights_mib(args.source), weights_mib(Path(args.destination))
    kind = "weights as they were" if args.scheme is None else f"{args.scheme} weights"
    weights = f"{kind}, {after:.2f} MiB (before: {before:.2f} MiB)"
    cache = "" if args.kv_cache is None else f"; scales of an {args.kv_cache} KV cache"
    print(f"{args.destination}: {weights}{cache}")
    return 0


COMMAND = Command("write a checkpoint with 8-bit weights or KV cache", _main)
