"""Numbers among the arguments: integers of any library, used as Python's own, and seconds."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from contextlib import suppress
from typing import SupportsIndex, TypeVar, cast

import numpy as np
import torch

T = TypeVar("T")


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


def at_least_one(argument: str, value: object) -> int:
    """Return what `as_integer` does, where it is positive.

    Raises:
        TypeError: as `as_integer`.
        ValueError: when it is less than 1.
    """
    number = as_integer(argument, value)
    if number < 1:
        raise ValueError(f"{argument}: got {number}, expected at least 1")
    return number


def as_seconds(argument: str, value: float) -> float:
    """Return a length of time as Python's own number.

    Raises:
        TypeError: when it is no number.
        ValueError: when it is NaN.
    """
    if not isinstance(value, (int, float, np.integer, np.floating)) or isinstance(value, bool):
        raise TypeError(f"{argument}: got {value!r}, expected a number of seconds")
    try:
        value = float(value)
    except OverflowError:
        value = math.copysign(math.inf, value)
    if math.isnan(value):
        raise ValueError(f"{argument}: got {value}, expected a number of seconds")
    return value


def as_list(argument: str, values: Iterable[T]) -> list[T]:
    """Return what should be several integers as a list, whatever they are.

    Raises:
        TypeError: when they cannot be iterated.
    """
    try:
        several = iter(values)
    except TypeError:
        raise TypeError(f"{argument}: got {values!r}, expected several integers") from None
    return list(several)
