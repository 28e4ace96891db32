"""Numbers that a launcher, as torchrun is, puts into the environment of each rank."""

from __future__ import annotations

import os


def number_of(name: str, default: str = "") -> int:
    """Return the number that a variable holds, or the default where it is not set.

    Raises:
        ValueError: naming the variable, when it holds no number.
    """
    text = os.environ.get(name, default)
    if not (text.isascii() and text.isdigit()):
        raise ValueError(f"{name}: got {text!r} in the environment, expected a number")
    return int(text)
