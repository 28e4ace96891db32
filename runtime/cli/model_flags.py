"""Flags that several commands have, of how a model is served."""

from __future__ import annotations

import argparse


def add_page_size_flag(parser: argparse._ActionsContainer) -> None:
    """Add --page-size."""
    parser.add_argument(
        "--page-size", type=int, default=16, metavar="N", help="tokens per KV page (default 16)"
    )


def add_batch_invariant_flag(
    parser: argparse._ActionsContainer,
    help: str = "let the bits of a sequence depend on what is served beside it, for faster kernels",
) -> None:
    """Add --no-batch-invariant, which makes `batch_invariant` False."""
    parser.add_argument(
        "--no-batch-invariant", dest="batch_invariant", action="store_false", help=help
    )
