"""`kernels`: lists the kernels, what each takes of an SM, and whether that is within its budget."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..jit.budgets import excesses, read_budgets, write_budgets
from ..jit.cache import Entry
from ..jit.compiler import find, library_folders, plan
from ..jit.location import cache_folder
from ..jit.registry import select
from ..jit.targets import DEFAULT, local_target, target_named
from .command import Command, Parser, UserError, user_errors

_OVER_BUDGET = 1


def _parser() -> Parser:
    parser = Parser(
        prog="ostinato kernels",
        usage="python -m ostinato kernels [NAME ...] [options]",
        description="List the kernels and, of those compiled, registers per thread, bytes spilled "
        "and of local memory per thread, bytes of static shared memory, and seconds of compiling.",
    )
    parser.add_argument("only", nargs="*", metavar="NAME", help="families or variants")
    parser.add_argument("--compiled", action="store_true", help="leave out what is not compiled")
    parser.add_argument(
        "--budgets",
        type=Path,
        metavar="F",
        help="compare with the limits in this file, docs/kernel_budgets.json in a checkout; "
        "the exit code is 1 when one is exceeded, 2 when no kernel is compiled",
    )
    parser.add_argument(
        "--write-budgets",
        type=Path,
        metavar="F",
        help="make what the compiled kernels take now their limits in this file",
    )
    parser.add_argument(
        "--arch",
        metavar="A",
        help="compiled for this GPU, as of `build --arch` (default: this machine's, else "
        f"{DEFAULT.name})",
    )
    return parser


def _main(argv: Sequence[str]) -> int:
    args = _parser().parse_args(argv)
    if args.budgets is not None and args.write_budgets is not None:
        raise UserError("--budgets and --write-budgets exclude each other")
    with user_errors():
        target = local_target() if args.arch is None else target_named(args.arch)
        if target != DEFAULT and (args.budgets or args.write_budgets):
            raise UserError(f"budgets: got {target}, expected {DEFAULT}: they are of its kernels")
        budgets = None if args.budgets is None else read_budgets(args.budgets)

    from ..ops.catalogue import CATALOGUE  # with torch

    width = max(len(variant.name) for variant in CATALOGUE)
    header = f"{'kernel':<{width}}{'registers':>11}{'spills':>8}{'stack':>7}{'smem':>7}{'s':>6}"
    with user_errors():
        variants = [v for v in select(CATALOGUE, only=args.only) if v.needs <= target.features]
        found = {variant.name: find(plan(variant, target=target)) for variant in variants}
        compiled = {name: entry for name, entry in found.items() if entry is not None}
        if budgets is not None and not compiled:
            raise UserError(
                f"--budgets: none of {len(found)} kernels is compiled, in {cache_folder()}: "
                "run `python -m ostinato build` before"
            )
        if args.write_budgets is not None:
            write_budgets(args.write_budgets, {n: entry.usage for n, entry in compiled.items()})
    places = " and ".join(map(str, library_folders()))
    print(f"{len(compiled)} of {len(found)} compiled for {target}, in {places}")
    print(header)
    code = 0
    for name, entry in found.items():
        if entry is not None:
            wrong = list(entry.usage.warnings)
            if budgets is not None:
                wrong = excesses(entry.usage, budgets.get(name))
                code = _OVER_BUDGET if wrong else code
            print("\n    ".join([_line(entry, width), *wrong]))
        elif not args.compiled:
            print(f"{name:<{width}}  not compiled")
    return code


def _line(entry: Entry, width: int) -> str:
    u = entry.usage
    return (
        f"{entry.variant:<{width}}{u.registers:>11}{u.spills:>8}{u.stack:>7}{u.smem:>7}"
        f"{entry.seconds:>6.0f}"
    )


COMMAND = Command("list kernels and what they take", _main)
