"""Flags that `bench gemm` and `tune` share."""

from __future__ import annotations

import argparse
from collections.abc import Iterable

from .command import UserError

_DTYPES = ("int8", "fp8", "fp8-block", "bf16")
_DEFAULT = ("int8", "fp8")


def add_dtype_flag(parser: argparse.ArgumentParser) -> None:
    """Add --dtype."""
    parser.add_argument(
        "--dtype",
        nargs="+",
        default=list(_DEFAULT),
        choices=_DTYPES,
        help=f"of our operands (default: {' '.join(_DEFAULT)})",
    )


def check_tokens(tokens: Iterable[int]) -> None:
    """Check the values of --m."""
    for m in tokens:
        if m < 1:
            raise UserError(f"--m: got {m}, expected at least 1")
