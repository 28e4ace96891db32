"""Whole numbers among the arguments: accepted from any library, used as Python's own."""

from __future__ import annotations

import operator
from contextlib import suppress
from typing import SupportsIndex, cast

import torch


def as_integer(argument: str, value: object) -> int:
    """Return `value` as a Python int, also where it is a NumPy integer or a tensor of one.

    Others must not be kept: a tensor is a dictionary key by identity, and a sum with it a tensor.

    Raises:
        TypeError: when it is not an integer, or a boolean, or a tensor that is more than a number.
    """
    if type(value) is int:
        return value
    # Torch takes a bool for an integer, and a row of one number for that number.
    odd = isinstance(value, torch.Tensor) and (value.dim() > 0 or value.dtype is torch.bool)
    if not isinstance(value, bool) and not odd:
        with suppress(TypeError):
            return operator.index(cast("SupportsIndex", value))
    raise TypeError(f"{argument}: got {value!r}, expected an integer")
