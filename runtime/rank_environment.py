"""Numbers that a launcher, as torchrun is, puts into the environment of each rank."""

from __future__ import annotations

import os


def world_size() -> int:
    """Return how many processes torchrun has started; 1 without it.

    Raises:
        ValueError: when WORLD_SIZE holds no number, or 0.
    """
    size = number_of("WORLD_SIZE", "1")
    if size < 1:
        raise ValueError(f"WORLD_SIZE: got {size} in the environment, expected at least 1")
    return size


def number_of(name: str, default: str = "") -> int:
    """Return the number that a variable holds, or the default where it is not set.

    Raises:
        ValueError: naming the variable, when it holds no number.
    """
    text = os.environ.get(name, default)
    if not (text.isascii() and text.isdigit()):
        raise ValueError(f"{name}: got {text!r} in the environment, expected a number")
    return int(text)
