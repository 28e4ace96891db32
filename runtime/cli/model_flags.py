"""Flags that several commands have, of how a model is served."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..models import ScaleKind


def add_page_size_flag(parser: argparse._ActionsContainer) -> None:
    """Add --page-size."""
    parser.add_argument(
        "--page-size", type=int, default=16, metavar="N", help="tokens per KV page (default 16)"
    )


# Names of `ostinato.models.kv_format`, which is not imported for --help.
KV_CACHE_DTYPES = ("auto", "bf16", "fp16", "fp32", "fp8", "int8")
KV_SCALES = ("static", "token")
_EIGHT_BITS = ("fp8", "int8")


def add_kv_cache_flags(
    parser: argparse._ActionsContainer, *, several: bool = False, when: str = ""
) -> None:
    """Add --kv-cache-dtype and --kv-scales.

    Args:
        parser: of the command.
        several: take several of both, for `kv_caches`.
        when: begins their help.
    """
    parser.add_argument(
        "--kv-cache-dtype",
        choices=KV_CACHE_DTYPES,
        nargs="+" if several else None,
        default=["auto"] if several else "auto",
        help=f"{when}of the KV cache: fp8 and int8 take half the memory; bf16, fp16 and fp32 are "
        "for models of that dtype (default auto: the 8 bits that the checkpoint is made for, or "
        "else the model's dtype)",
    )
    parser.add_argument(
        "--kv-scales",
        choices=KV_SCALES,
        nargs="+" if several else None,
        help=f"{when}of an 8-bit KV cache: the checkpoint's, or of fp8 1; or one per token and "
        "head (default: the checkpoint's where it has some, else token)",
    )


def kv_caches(args: argparse.Namespace) -> list[tuple[str, ScaleKind | None]]:
    """Return each dtype of several with its scales: of 8 bits in turn those that are asked for.

    Where no dtype is of 8 bits all get them, for `kv_format` to judge.
    """
    asked: list[ScaleKind | None] = args.kv_scales or [None]
    alone = not any(dtype in _EIGHT_BITS for dtype in args.kv_cache_dtype)
    found = (
        (dtype, scales)
        for dtype in args.kv_cache_dtype
        for scales in (asked if alone or dtype in _EIGHT_BITS else [None])
    )
    return list(dict.fromkeys(found))


def add_batch_invariant_flag(
    parser: argparse._ActionsContainer,
    help: str = "let the bits of a sequence depend on what is served beside it, for faster kernels",
) -> None:
    """Add --no-batch-invariant, which makes `batch_invariant` False."""
    parser.add_argument(
        "--no-batch-invariant", dest="batch_invariant", action="store_false", help=help
    )
