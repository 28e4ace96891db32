"""Checks of arguments: each raises an error that names the argument, what was got and expected."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TypeAlias

import torch

FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
QUANTIZED_DTYPES = (torch.int8, torch.float8_e4m3fn)
INT32_MAX = 2**31 - 1
_LARGEST_SIZE = INT32_MAX - 1024  # kernels count one tile beyond the last, in 32 bits

Stream: TypeAlias = torch.cuda.Stream | int | None

_FP32_MAX = torch.finfo(torch.float32).max
_CURRENT_STREAM = nullcontext()


def tensor(
    name: str,
    value: torch.Tensor,
    dtypes: Sequence[torch.dtype],
    shape: Sequence[int | str],
    device: torch.device | None = None,
    *,
    any_strides: bool = False,
) -> None:
    """Check that `value` is a tensor of one of `dtypes`, of `shape`, on `device`.

    A string in `shape` names a dimension of any size. The elements of the last dimension must be
    adjacent in memory unless `any_strides`; every other stride is free.

    Raises:
        TypeError: if it is no tensor, or of another dtype.
        ValueError: if the shape, the device or the layout differs.
    """
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name}: got {type(value).__name__}, expected a tensor")
    if value.dtype not in dtypes:
        raise TypeError(f"{name}: got dtype {value.dtype}, expected {_one_of(dtypes)}")
    sizes = value.shape
    if sizes != shape and not _matches(sizes, shape):
        expected = ", ".join(map(str, shape))
        raise ValueError(f"{name}: got shape {list(sizes)}, expected [{expected}]")
    if device is not None and value.device != device:
        raise ValueError(f"{name}: got a tensor on {value.device}, expected one on {device}")
    if not any_strides and sizes and sizes[-1] > 1 and value.stride(-1) != 1:
        raise ValueError(
            f"{name}: got strides {list(value.stride())}, expected 1 in the last dimension"
        )


def output(
    name: str,
    value: torch.Tensor,
    dtypes: Sequence[torch.dtype],
    shape: Sequence[int | str],
    device: torch.device,
) -> None:
    """Check that `value` is such a `tensor`, and `writable`."""
    tensor(name, value, dtypes, shape, device)
    writable(name, value)


def writable(name: str, value: torch.Tensor) -> None:
    """Check that no stride of `value` is 0, which would lay several elements on one address.

    And that torch's operators, which write it on a CPU, may: outside of `torch.inference_mode` they
    refuse tensors that were made in it. And that no gradient is asked for, which would be that of
    what was there before.
    """
    if value.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            f"{name}: got a tensor that requires a gradient, expected none for what is written "
            "(torch.no_grad() says that none is wanted)"
        )
    if not (value.is_cuda or torch.compiler.is_compiling()) and (
        value.is_inference() and not torch.is_inference_mode_enabled()
    ):
        raise ValueError(
            f"{name}: got a tensor made in torch.inference_mode, expected one that may be written "
            "outside of it"
        )
    strides = value.stride()
    if 0 in strides and any(s == 0 and n > 1 for s, n in zip(strides, value.shape, strict=True)):
        raise ValueError(
            f"{name}: got strides {list(strides)} for shape {list(value.shape)}, "
            "expected elements that share no memory"
        )


def scalar(name: str, value: torch.Tensor, dtype: torch.dtype, device: torch.device) -> None:
    """Check that `value` is a tensor of one element, 0-d or [1], of `dtype` on `device`."""
    shape: Sequence[int | str] = (1,) if getattr(value, "ndim", 0) else ()
    tensor(name, value, (dtype,), shape, device)


def scalar_or_vector(
    name: str, value: torch.Tensor, dtype: torch.dtype, size: int, device: torch.device
) -> None:
    """Check that `value` is a `scalar`, or a vector [size], of `dtype` on `device`."""
    if getattr(value, "ndim", 0) == 1 and value.size(0) != 1:
        tensor(name, value, (dtype,), (size,), device)
    else:
        scalar(name, value, dtype, device)


def positive_scale(name: str, value: torch.Tensor | None, *, or_zero: bool = False) -> None:
    """Check that every element of a scale is finite and positive `or_zero`; waits for the device.

    None is no scale, and passes.
    """
    if value is None:
        return
    for element in value.flatten().tolist():
        if not (math.isfinite(element) and (element > 0 or (or_zero and element == 0))):
            expected = "at least 0" if or_zero else "above 0"
            raise ValueError(f"{name}: got {element}, expected finite numbers {expected}")


def zero_points(name: str, value: torch.Tensor | None, *, wait: bool) -> None:
    """Check that every zero point is from -128 to 127; None passes.

    Those of a GPU are looked at only if the host may `wait` for it; so are vectors, which may have
    elements of padding.
    """
    if value is None or not (wait or (value.numel() == 1 and value.device.type == "cpu")):
        return
    for element in value.flatten().tolist():
        if not -128 <= element <= 127:
            raise ValueError(f"{name}: got {element}, expected -128 to 127")


def active(n_active: torch.Tensor | None, device: torch.device) -> None:
    """Check the number of rows that are real."""
    if n_active is not None:
        tensor("n_active", n_active, (torch.int32,), (1,), device)


def not_empty(name: str, value: torch.Tensor, *dimensions: str) -> None:
    """Check that none of the last dimensions of `value`, named here in order, has size 0."""
    if 0 not in value.shape:
        return
    for dimension, size in zip(reversed(dimensions), reversed(value.shape), strict=False):
        if size == 0:
            raise ValueError(f"{name}: got {dimension} = 0, expected at least 1")


def int32_sizes(name: str, shape: Sequence[int], *dimensions: str) -> None:
    """Check that the sizes of a tensor, of dimensions named here, fit the kernels' 32 bits."""
    for dimension, size in zip(dimensions, shape, strict=True):
        if size > _LARGEST_SIZE:
            raise ValueError(f"{name}: got {dimension} = {size}, expected at most {_LARGEST_SIZE}")


def both_or_neither(
    first: str, first_value: object | None, second: str, second_value: object | None
) -> None:
    """Check that neither of two arguments is None, or that both are."""
    if (first_value is None) != (second_value is None):
        missing, given = (first, second) if first_value is None else (second, first)
        raise ValueError(f"{missing}: got None with {given}, expected both or neither")


def integer(name: str, value: int, *, least: int) -> None:
    """Check that `value` is an int of at least `least`; what torch traces may have a symbol."""
    if not isinstance(value, (int, torch.SymInt)) or isinstance(value, bool):
        raise TypeError(f"{name}: got {type(value).__name__}, expected an int")
    if value < least:
        raise ValueError(f"{name}: got {value}, expected at least {least}")


def token_values(name: str, values: Sequence[int], *, least: int, most: int) -> None:
    """Check that an integer for each of one or more tokens is from `least` to `most`."""
    if min(values) < least or max(values) > most:
        token = next(t for t, value in enumerate(values) if not least <= value <= most)
        raise ValueError(
            f"{name}: got {values[token]} for token {token}, expected {least} to {most}"
        )


def number(name: str, value: float, *, least: float = -math.inf) -> None:
    """Check that `value` is a Python number of at least `least`, finite also in fp32."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise TypeError(f"{name}: got {type(value).__name__}, expected a number")
    # Kernels take fp32. Not math.isfinite: with dynamic shapes torch.compile traces a module's
    # floats as symbols.
    if not (-_FP32_MAX <= value <= _FP32_MAX and value >= least):
        bound = "" if least == -math.inf else f" of at least {least:g}"
        raise ValueError(f"{name}: got {value}, expected a finite number{bound}")


def flag(name: str, value: bool) -> None:
    """Check that `value` is a bool."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}: got {type(value).__name__}, expected a bool")


def option(name: str, value: torch.dtype, allowed: Sequence[torch.dtype]) -> None:
    """Check that the dtype `value` is one of `allowed`."""
    if value not in allowed:
        raise TypeError(f"{name}: got {value}, expected {_one_of(allowed)}")


def launch_stream(stream: Stream, device: torch.device) -> AbstractContextManager[object]:
    """Return a context that makes `stream` current on `device`; None keeps torch's own.

    Raises:
        TypeError: if `stream` is neither a torch.cuda.Stream, an integer handle nor None.
        ValueError: if it is not None for a device without streams, or belongs to another device.
    """
    if stream is None:
        return _CURRENT_STREAM
    if device.type != "cuda":
        raise ValueError(f"stream: got {stream!r}, expected None for tensors on {device}")
    if isinstance(stream, torch.cuda.Stream):
        if stream.device != device:
            raise ValueError(f"stream: got one of {stream.device}, expected one of {device}")
        return torch.cuda.stream(stream)
    if not isinstance(stream, int) or isinstance(stream, bool):
        raise TypeError(
            f"stream: got {type(stream).__name__}, expected a torch.cuda.Stream, "
            "its integer handle or None"
        )
    if stream == 0:
        return torch.cuda.stream(torch.cuda.default_stream(device))
    return torch.cuda.stream(torch.cuda.ExternalStream(stream, device))


def _matches(sizes: Sequence[int], shape: Sequence[int | str]) -> bool:
    if len(sizes) != len(shape):
        return False
    for size, want in zip(sizes, shape, strict=True):
        if want != size and not isinstance(want, str):
            return False
    return True


def _one_of(dtypes: Sequence[torch.dtype]) -> str:
    return " or ".join(str(dtype) for dtype in dtypes)
