"""The header of a safetensors file: which tensors it holds, and whether they are all there.

Format: https://github.com/huggingface/safetensors#format. The library that reads the data would
refuse a damaged file too, but without saying which tensor is hit.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from math import prod
from operator import index
from pathlib import Path
from typing import Any

import torch

from ..models.config_fields import shown
from .errors import CheckpointError
from .files import open_regular, unreadable
from .section import parse_json

# Spelling of dtypes in the file. Others exist; they are kept as text and never asked for. Some of
# these are of other towers only, and copied.
DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.uint8: "U8",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.bool: "BOOL",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
}
_ITEM_SIZES = {name: dtype.itemsize for dtype, name in DTYPE_NAMES.items()}
_LENGTH_BYTES = 8
_MAX_SIZES = 64  # of a shape and its place
_MAX_SIZE = 2**63 - 1
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as its file describes it; `dtype` is spelt as in the file."""

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a safetensors file by name, reading none of their data.

    Raises:
        CheckpointError: naming the file, and the tensor if there is one, when the file is
            missing, no regular file or truncated or its header is damaged.
    """
    try:
        with open_regular(file) as stream:
            size = os.fstat(stream.fileno()).st_size
            length = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
            data_size = size - _LENGTH_BYTES - length
            if size < _LENGTH_BYTES or data_size < 0 or length > _MAX_HEADER_BYTES:
                raise CheckpointError(
                    f"{file}: truncated, or not a safetensors file: got {size} bytes, expected "
                    f"a header of {length} and its length"
                )
            text = stream.read(length)
    except OSError as error:
        raise unreadable(file, error) from error
    entries = parse_json(text, f"{file}: corrupt safetensors header")
    if not isinstance(entries, dict):
        raise CheckpointError(f"{file}: corrupt safetensors header: it is no JSON object")
    return {
        name: _stored(file, name, entry, data_size)
        for name, entry in entries.items()
        if name != "__metadata__"
    }


def _stored(file: Path, name: str, entry: Any, data_size: int) -> StoredTensor:
    try:
        dtype, shape = str(entry["dtype"]), tuple(map(index, entry["shape"]))
        begin, end = map(index, entry["data_offsets"])
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{file}: corrupt safetensors header: {name}: got {shown(entry)}, expected dtype, "
            "shape and data_offsets"
        ) from error
    sizes = (*shape, begin, end)
    damaged = len(sizes) > _MAX_SIZES or min(sizes) < 0 or max(sizes) > _MAX_SIZE or end < begin
    # The product of many large numbers would take hours.
    expected = 0 if damaged else prod(shape) * _ITEM_SIZES.get(dtype, 0)
    if damaged or (dtype in _ITEM_SIZES and end - begin != expected):
        raise CheckpointError(
            f"{file}: corrupt safetensors header: {name}: {dtype} {shown(list(shape))} cannot "
            f"occupy bytes {shown(begin)} to {shown(end)}"
        )
    if end > data_size:
        raise CheckpointError(
            f"{file}: truncated: {name} ends at byte {end} of the data, of which there are only "
            f"{data_size}"
        )
    return StoredTensor(file, name, dtype, shape)
