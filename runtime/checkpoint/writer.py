"""Writes safetensors files tensor by tensor, so that no file is ever held in memory."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch

from .header import DTYPE_NAMES
from .reader import INDEX_FILE, SINGLE_FILE

_ALIGNMENT = 8


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor that will be written."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


class CheckpointWriter:
    """Writes planned tensors in any order, to one file or to shards with an index.

    Args:
        folder: where the files go.
        tensors: everything that will be written; neighbours share a shard.
        max_shard_bytes: how much data one file may hold; a larger tensor gets its own file.
    """

    def __init__(
        self, folder: Path, tensors: Iterable[PlannedTensor], max_shard_bytes: int
    ) -> None:
        shards = _split(tensors, max_shard_bytes)
        self._places: dict[str, tuple[Path, int]] = {}
        total = len(shards)
        names = [SINGLE_FILE] if total == 1 else [_shard_name(i, total) for i in range(total)]
        for name, shard in zip(names, shards, strict=True):
            self._places.update(_write_header(folder / name, shard))
        if total > 1:
            nbytes = sum(tensor.nbytes for shard in shards for tensor in shard)
            weight_map = {name: file.name for name, (file, _) in self._places.items()}
            index = {"metadata": {"total_size": nbytes}, "weight_map": weight_map}
            (folder / INDEX_FILE).write_text(json.dumps(index, indent=2), encoding="utf-8")

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Write a planned tensor, of the planned dtype and shape."""
        file, offset = self._places[name]
        with file.open("r+b") as stream:
            stream.seek(offset)
            stream.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)


def force_to_disk(path: Path) -> None:
    """Wait until a file, or a folder's list of files, would survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _split(tensors: Iterable[PlannedTensor], max_bytes: int) -> list[list[PlannedTensor]]:
    shards: list[list[PlannedTensor]] = [[]]
    size = 0
    for tensor in tensors:
        if shards[-1] and size + tensor.nbytes > max_bytes:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.nbytes
    return shards


def _shard_name(index: int, total: int) -> str:
    return f"model-{index + 1:05}-of-{total:05}.safetensors"


def _write_header(file: Path, tensors: list[PlannedTensor]) -> dict[str, tuple[Path, int]]:
    """Write a file's header and return where in it each tensor's data belongs."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offsets: dict[str, int] = {}
    end = 0
    # Widest elements first: then every tensor begins at a multiple of its element size.
    for tensor in sorted(tensors, key=lambda tensor: (-tensor.dtype.itemsize, tensor.name)):
        offsets[tensor.name] = end
        end += tensor.nbytes
        header[tensor.name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offsets[tensor.name], end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    start = _ALIGNMENT + len(text)
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(_ALIGNMENT, "little"))
        stream.write(text)
        stream.truncate(start + end)
    return {name: (file, start + offset) for name, offset in offsets.items()}
