"""Tensors made once for each number of rows, of the latest numbers only."""

from __future__ import annotations

from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")

_MOST = 128  # as many as `FastReplay` has runs


def keep(kept: dict[K, V], key: K, value: V) -> None:
    """Add a value to those kept, in place of the oldest if they are many.

    Numbers of rows may be many: those of a runner of prompts are lengths of prompts.
    """
    if len(kept) >= _MOST:
        del kept[next(iter(kept))]
    kept[key] = value
