"""Reads the safetensors files of a checkpoint folder, one or many, and checks what they hold."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ..models.config_fields import shown
from ..models.modules import DENSE_DTYPES, TensorSpec
from .errors import CheckpointError
from .files import MAX_INDEX_BYTES, is_there
from .finite import is_finite
from .header import DTYPE_NAMES, StoredTensor, read_header
from .section import Section
from .text_tower import split_towers, stored_name

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

# Tensors that old exporters wrote though they follow from the configuration, by suffix.
HARMLESS = (".rotary_emb.inv_freq",)

_NAMES_SHOWN = 5

# Bytes of a tensor by which it is told from another's: of its middle, since rows that pad a table
# are alike.
_SAMPLE_BYTES = 64


class CheckpointReader:
    """The tensors of a checkpoint folder. Use it as a context manager: it holds files open.

    Args:
        folder: holds `model.safetensors`, or shards and `model.safetensors.index.json`.
        text_tower: whether it holds other towers, too, which are not part of the model.

    Raises:
        CheckpointError: naming the file, when one is missing, truncated or damaged, or when the
            index and its shards disagree. No tensor data has been read then.
    """

    def __init__(self, folder: Path, *, text_tower: bool = False) -> None:
        self._files = ExitStack()
        self._opened: dict[Path, Any] = {}
        single, index = folder / SINGLE_FILE, folder / INDEX_FILE
        if is_there(single):
            self._source = single
            self._stored = read_header(single)
        elif is_there(index):
            self._source = index
            self._stored = _read_shards(index)
        else:
            raise CheckpointError(
                f"{folder}: holds neither {SINGLE_FILE} nor {INDEX_FILE}; weights in other "
                "formats (.bin, .gguf, .pth) are not read"
            )
        self._others: dict[str, StoredTensor] = {}
        if text_tower:
            self._stored, self._others = split_towers(self._stored)

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._opened.clear()
        self._files.close()

    def set_aside(self, prefixes: tuple[str, ...]) -> None:
        """Take tensors whose names begin so for others, which are not part of the model."""
        for name in [name for name in self._stored if name.startswith(prefixes)]:
            stored = self._stored.pop(name)
            self._others[stored.name] = stored

    def check_layers(self, count: int) -> None:
        """Check that the checkpoint may have this many layers, before any of them is described.

        Raises:
            CheckpointError: when it holds fewer tensors.
        """
        if len(self._stored) < count:
            of = " of the text tower" if self._others else ""
            raise CheckpointError(
                f"{self._source}: holds {len(self._stored)} tensors{of}, too few for "
                f"num_hidden_layers = {count} of config.json"
            )

    def check(self, specs: Iterable[TensorSpec]) -> None:
        """Check that the checkpoint holds these tensors and no others, reading no data.

        Raises:
            CheckpointError: naming file and tensor, for one that is missing, unknown, or of
                another shape or dtype.
        """
        known = self.check_tensors(specs)
        extra = [
            stored
            for stored in self._stored.values()
            if stored.name not in known and not stored.name.endswith(HARMLESS)
        ]
        if extra:
            names = [stored.name for stored in extra]
            raise CheckpointError(
                f"{extra[0].file}: {_some(names)} not part of the model that config.json describes"
            )

    def check_tensors(self, specs: Iterable[TensorSpec]) -> set[str]:
        """Check that the checkpoint holds these tensors, and return what it calls them.

        Raises:
            CheckpointError: naming file and tensor, for one that is missing, or of another shape or
                dtype.
        """
        known: set[str] = set()
        missing: list[str] = []
        for spec in specs:
            if self.has(spec):
                stored = self._located(spec)
                known.add(stored.name)
                _check_tensor(stored, spec)
            elif spec.required:
                missing.append(" or ".join(map(self.stored_name, spec.names)))
        if missing:
            raise CheckpointError(f"{self._source}: missing {_some(missing)}")
        return known

    def has(self, spec: TensorSpec) -> bool:
        """Return whether the checkpoint holds a tensor."""
        return any(name in self._stored for name in spec.names)

    def read(self, spec: TensorSpec) -> torch.Tensor:
        """Return a tensor of a checked checkpoint, on the CPU.

        The result is backed by the file: copy what must outlive the reader.

        Raises:
            CheckpointError: when the data cannot be read.
        """
        tensor = self._read(self._located(spec))
        if spec.transposable and tensor.shape != spec.shapes[0]:
            tensor = tensor.mT
        return tensor if spec.index is None else tensor[spec.index]

    def found_name(self, spec: TensorSpec) -> str:
        """Return what the checkpoint calls a tensor that it holds."""
        return self._located(spec).name

    def stored_name(self, name: str) -> str:
        """Return what the checkpoint calls a tensor, or would if it held it."""
        if name in self._stored:
            return self._stored[name].name
        return stored_name(name, (tensor.name for tensor in self._stored.values()))

    @property
    def others(self) -> tuple[str, ...]:
        """The names of tensors of other towers, and of those that were set aside."""
        return tuple(self._others)

    def read_other(self, name: str) -> torch.Tensor:
        """Return a tensor of `others`; see `read`."""
        return self._read(self._others[name])

    def fingerprint(self) -> str:
        """Return 16 hexadecimal digits that copies of a checked checkpoint have in common.

        They are of names, dtypes and shapes of the model's tensors, and of 64 bytes of each: enough
        to tell a model from one that was trained further, not to find a damaged byte. How tensors
        are spread over files does not matter.

        Raises:
            CheckpointError: when data cannot be read.
        """
        digest = hashlib.blake2b(digest_size=8)
        for name in sorted(self._stored):
            stored = self._stored[name]
            data = self._read(stored).reshape(-1).view(torch.uint8)
            sample = data[len(data) // 2 :][:_SAMPLE_BYTES].numpy().tobytes()
            digest.update(f"{name} {stored.dtype} {stored.shape} {sample!r}\n".encode())
        return digest.hexdigest()

    def _read(self, stored: StoredTensor) -> torch.Tensor:
        try:
            if stored.file not in self._opened:
                self._opened[stored.file] = self._files.enter_context(
                    safe_open(stored.file, framework="pt", device="cpu")
                )
            tensor: torch.Tensor = self._opened[stored.file].get_tensor(stored.name)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{_where(stored)}: {error}") from error
        return tensor

    def dense_dtype(self, spec: TensorSpec) -> torch.dtype | None:
        """Return the dtype of a tensor, None where there is no such tensor, or of no such dtype."""
        if not self.has(spec):
            return None
        stored = self._located(spec).dtype
        return next((dtype for dtype in DENSE_DTYPES if DTYPE_NAMES[dtype] == stored), None)

    @property
    def files(self) -> set[Path]:
        """The files that hold the tensors."""
        return {stored.file for stored in (*self._stored.values(), *self._others.values())}

    def where(self, spec: TensorSpec) -> str:
        """Return the file and the name of a tensor, for messages."""
        entry = "" if spec.index is None else f"[{spec.index}]"
        return f"{_where(self._located(spec))}{entry}"

    def _located(self, spec: TensorSpec) -> StoredTensor:
        for name in spec.names:
            if name in self._stored:
                return self._stored[name]
        raise CheckpointError(f"{self._source}: missing {spec.name}")


def holds_weights(folder: Path) -> bool:
    """Return whether a folder holds what a `CheckpointReader` reads."""
    return any(is_there(folder / name) for name in (SINGLE_FILE, INDEX_FILE))


def require_finite(reader: CheckpointReader, spec: TensorSpec) -> None:
    """Check that a tensor of a checked checkpoint holds nothing but numbers.

    Raises:
        CheckpointError: naming the file and the tensor, when it holds NaN or an infinity.
    """
    if not is_finite(reader.read(spec)):
        raise CheckpointError(f"{reader.where(spec)}: holds NaN or an infinity")


def _read_shards(index: Path) -> dict[str, StoredTensor]:
    weight_map = Section.read(index, MAX_INDEX_BYTES).child("weight_map").fields
    headers: dict[str, dict[str, StoredTensor]] = {}
    stored: dict[str, StoredTensor] = {}
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or not _is_file_name(shard):
            raise CheckpointError(
                f"{index}: weight_map: {name}: got {shown(shard)}, expected the name of a file "
                "beside it"
            )
        if shard not in headers:
            headers[shard] = _read_shard(index, shard, weight_map)
        if name not in headers[shard]:
            raise CheckpointError(f"{index.with_name(shard)}: missing {name}, which {index} lists")
        stored[name] = headers[shard][name]
    return stored


def _read_shard(
    index: Path, shard: str, weight_map: Mapping[str, object]
) -> dict[str, StoredTensor]:
    file = index.with_name(shard)
    header = read_header(file)
    # Before the next shard, so that the headers held are no larger than the index.
    for name in header:
        if weight_map.get(name) != shard:
            raise CheckpointError(f"{file}: {name} is not listed for this file in {index}")
    return header


def _is_file_name(text: str) -> bool:
    return Path(text).name == text and text not in ("", "..") and "\0" not in text


def _check_tensor(stored: StoredTensor, spec: TensorSpec) -> None:
    dtypes = [DTYPE_NAMES[dtype] for dtype in spec.dtypes]
    if stored.dtype not in dtypes:
        raise CheckpointError(
            f"{_where(stored)}: got dtype {stored.dtype}, expected {' or '.join(dtypes)}"
        )
    if stored.shape not in spec.shapes:
        shapes = " or ".join(str(list(shape)) for shape in spec.shapes)
        raise CheckpointError(
            f"{_where(stored)}: got shape {list(stored.shape)}, expected {shapes}"
        )


def _where(stored: StoredTensor) -> str:
    return f"{stored.file}: {stored.name}"


def _some(names: list[str]) -> str:
    rest = len(names) - _NAMES_SHOWN
    return ", ".join(names[:_NAMES_SHOWN]) + (f" and {rest} more" if rest > 0 else "")
