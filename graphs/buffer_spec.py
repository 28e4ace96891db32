"""What one input of a step looks like, and the check of a caller's value against it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

Example = Callable[[torch.Generator, tuple[int, ...]], torch.Tensor]

# Those that torch can fill and compare.
_DTYPES = frozenset(
    (
        *(torch.bool, torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
        *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
    )
)


@dataclass(frozen=True)
class BufferSpec:
    """One input of a step: a row of it per sequence of the batch.

    Args:
        shape: of one row, without the batch dimension; `()` for one number per row.
        dtype: a boolean, integer or floating-point dtype.
        pad: what padding rows hold. It must make a row harmless: it attends to nothing and writes
            to no place that a real row reads.
        example: makes plausible rows for verification, from a CPU generator and the shape
            `(rows, *shape)`; converted to `dtype`. Without it verification uses `pad`. The step is
            really run on examples, at every `capture` and `recapture`: whatever it writes for them
            is written, so they must name places that hold nothing of value.

    Raises:
        TypeError, ValueError: when an argument is of the wrong kind, or `pad` does not fit `dtype`.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    pad: float | int | bool
    example: Example | None = None

    def __post_init__(self) -> None:
        """Check the fields."""
        if not isinstance(self.shape, tuple) or not all(type(d) is int for d in self.shape):
            raise TypeError(f"shape: got {self.shape!r}, expected a tuple of integers")
        if any(d < 1 for d in self.shape):
            raise ValueError(f"shape: got {self.shape}, expected dimensions of at least 1")
        if not isinstance(self.dtype, torch.dtype):
            raise TypeError(f"dtype: got {self.dtype!r}, expected a torch.dtype")
        if self.dtype not in _DTYPES:
            raise ValueError(f"dtype: got {self.dtype}, expected booleans, integers or floats")
        if self.example is not None and not callable(self.example):
            raise TypeError(f"example: got {self.example!r}, expected a callable or None")
        self._check_pad()

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return math.prod(self.shape) * self.dtype.itemsize

    def _check_pad(self) -> None:
        is_bool, floating = isinstance(self.pad, bool), self.dtype.is_floating_point
        is_number = isinstance(self.pad, (int, float) if floating else int) and not is_bool
        if not (is_bool if self.dtype is torch.bool else is_number):
            raise TypeError(f"pad: got {self.pad!r}, expected a value of {self.dtype}")
        if self.dtype is torch.bool:
            return
        if floating:
            overflows = abs(self.pad) > torch.finfo(self.dtype).max  # so NaN does not
            fits = not overflows or (abs(self.pad) == math.inf and _has_infinity(self.dtype))
        else:
            limits = torch.iinfo(self.dtype)
            fits = limits.min <= self.pad <= limits.max
        if not fits:
            raise ValueError(f"pad: got {self.pad!r}, which {self.dtype} cannot hold")


def as_rows(
    name: str, value: object, spec: BufferSpec, n: int, device: torch.device
) -> torch.Tensor:
    """Return a caller's input as a tensor `(n, *spec.shape)` of `spec.dtype`, on CPU or `device`.

    Tensors are taken as they are; anything else goes through `torch.as_tensor`, and numbers may
    change dtype where they keep their value's kind and are in range. Floats are rounded.

    Raises:
        TypeError: when the value is not a tensor or numbers, or has another dtype.
        ValueError: when the shape, layout or device is another, or a number does not fit.
    """
    if not isinstance(value, torch.Tensor):
        return _numbers_as_rows(name, value, spec, n)
    if value.dtype is not spec.dtype:
        raise TypeError(f"inputs[{name!r}]: got {value.dtype}, expected {spec.dtype}")
    _check_shape(name, value, spec, n)
    if not (value.is_cpu or value.device == device):
        places = "cpu" if device.type == "cpu" else f"cpu or {device}"
        raise ValueError(f"inputs[{name!r}]: got a tensor on {value.device}, expected {places}")
    if value.layout is not torch.strided:
        raise ValueError(f"inputs[{name!r}]: got layout {value.layout}, expected torch.strided")
    # A copy of it into a buffer would make the buffer part of an autograd graph.
    return value.detach() if value.requires_grad else value


def _numbers_as_rows(name: str, value: object, spec: BufferSpec, n: int) -> torch.Tensor:
    floating = spec.dtype.is_floating_point
    if isinstance(value, np.ndarray) and np.iscomplexobj(value):  # torch would take the real part
        raise TypeError(f"inputs[{name!r}]: got numbers of {value.dtype}, expected {spec.dtype}")
    if isinstance(value, np.ndarray) and min(value.strides, default=0) < 0:
        value = value.copy()  # torch has no such strides
    try:
        # Directly in a narrow dtype, numbers too large for it would become infinite or saturate.
        dtype = torch.float64 if floating else None
        rows = torch.as_tensor(value, dtype=dtype, device="cpu")
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise TypeError(
            f"inputs[{name!r}]: got {type(value).__name__}, expected a tensor or numbers: {error}"
        ) from error
    _check_shape(name, rows, spec, n)
    if rows.dtype is spec.dtype:
        return rows
    if floating:
        _check_range(name, rows, spec.dtype)
        return rows.to(spec.dtype)
    if not torch.can_cast(rows.dtype, spec.dtype):
        raise TypeError(f"inputs[{name!r}]: got numbers of {rows.dtype}, expected {spec.dtype}")
    if rows.dtype is not torch.bool:
        limits = torch.iinfo(spec.dtype)
        numbers = rows.numpy()  # torch has no minimum of unsigned numbers
        low, high = int(numbers.min()), int(numbers.max())
        if low < limits.min or high > limits.max:
            raise ValueError(
                f"inputs[{name!r}]: got numbers from {low} to {high}, "
                f"expected {limits.min} to {limits.max} for {spec.dtype}"
            )
    return rows.to(spec.dtype)


def _check_range(name: str, rows: torch.Tensor, dtype: torch.dtype) -> None:
    magnitudes, largest = rows.abs(), torch.finfo(dtype).max
    if magnitudes.max().item() <= largest:  # nearly always; NaN and infinity need a closer look
        return
    overflows = magnitudes > largest
    if _has_infinity(dtype):
        overflows &= magnitudes != math.inf
    if overflows.any():
        raise ValueError(
            f"inputs[{name!r}]: got numbers up to {magnitudes[overflows].max().item()} in "
            f"magnitude, expected at most {largest} for {dtype}"
        )


@lru_cache
def _has_infinity(dtype: torch.dtype) -> bool:
    return bool(torch.tensor(math.inf, device="cpu").to(dtype).float().isinf())


def _check_shape(name: str, value: torch.Tensor, spec: BufferSpec, n: int) -> None:
    if value.shape != (n, *spec.shape):
        raise ValueError(
            f"inputs[{name!r}]: got shape {tuple(value.shape)}, expected {(n, *spec.shape)}"
        )
