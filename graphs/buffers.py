"""Static buffers: the memory a captured step reads its inputs from, and staging into it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from ostinato.graphs.integers import as_integer
from ostinato.graphs.keys import DEFAULT, Key, Variant
from ostinato.graphs.spec import BufferSpec, as_rows


class BatchView:
    """The first `size` rows of every buffer: what a step is called with.

    Each buffer is an attribute and an item of its name. The views are of static memory: the same
    addresses at every call, so that a captured graph finds its inputs.

    Attributes:
        size: rows, padding included.
        n_active: int32 [1] on the buffers' device: how many of them are real.
        variant: what else the step's launches may depend on.
    """

    def __init__(
        self,
        rows: Mapping[str, torch.Tensor],
        size: int,
        n_active: torch.Tensor,
        variant: Variant = DEFAULT,
    ) -> None:
        self._rows = rows
        self.size = size
        self.n_active = n_active
        self.variant = variant

    def __getitem__(self, name: str) -> torch.Tensor:
        """Return the rows of the buffer `name`."""
        try:
            return self._rows[name]
        except KeyError:
            raise KeyError(f"no buffer {name!r}, only {sorted(self._rows)}") from None

    def __getattr__(self, name: str) -> torch.Tensor:
        """Return the rows of the buffer `name`."""
        # Looked up in __dict__ since copy and pickle ask for attributes before any are set.
        rows: Mapping[str, torch.Tensor] = self.__dict__.get("_rows", {})
        if name not in rows:
            raise AttributeError(f"no buffer {name!r}, only {sorted(rows)}")
        return rows[name]


class _Rows:
    """One tensor `(max_batch, *shape)` per buffer, all in one kind of memory, full of padding."""

    def __init__(
        self,
        specs: Mapping[str, BufferSpec],
        max_batch: int,
        device: torch.device,
        pin_memory: bool = False,
    ) -> None:
        self._specs = specs
        self._all = {
            name: torch.empty(
                (max_batch, *spec.shape), dtype=spec.dtype, device=device, pin_memory=pin_memory
            )
            for name, spec in specs.items()
        }
        # Slicing costs as much as copying a few rows, so every slice is made once.
        self._slices: dict[tuple[int, int], dict[str, torch.Tensor]] = {}
        self.pad(0, max_batch)

    def head(self, n: int) -> dict[str, torch.Tensor]:
        return self._slice(0, n)

    def pad(self, start: int, stop: int) -> None:
        for name, rows in self._slice(start, stop).items():
            rows.fill_(self._specs[name].pad)

    def write(self, inputs: Mapping[str, torch.Tensor], n: int, bucket: int) -> None:
        real = self.head(n)
        for name, value in inputs.items():
            real[name].copy_(value)
        if n < bucket:
            padding = self._slice(n, bucket)
            for name in inputs:
                padding[name].fill_(self._specs[name].pad)

    def _slice(self, start: int, stop: int) -> dict[str, torch.Tensor]:
        slices = self._slices.get((start, stop))
        if slices is None:
            slices = {name: rows[start:stop] for name, rows in self._all.items()}
            self._slices[start, stop] = slices
        return slices


class StaticBuffers:
    """Input buffers of a step, allocated once and never moved.

    Inputs from the host go through pinned memory, which is written again only after the copy from
    it has finished. Copies run on torch's current stream.

    Args:
        specs: name and form of each input; names are identifiers.
        max_batch: rows of each buffer.
        device: "cpu" or a CUDA device.

    Raises:
        TypeError, ValueError: when an argument is of the wrong kind or out of range.
    """

    def __init__(
        self, specs: Mapping[str, BufferSpec], max_batch: int, device: torch.device | str
    ) -> None:
        _check_specs(specs)
        max_batch = as_integer("max_batch", max_batch)
        if max_batch < 1:
            raise ValueError(f"max_batch: got {max_batch}, expected at least 1")
        self.device = _resolve(device)
        self.max_batch = max_batch
        self.specs: Mapping[str, BufferSpec] = MappingProxyType(dict(specs))
        # Made in inference mode they could not be written outside it.
        with torch.inference_mode(False):
            self._n_active = torch.zeros(1, dtype=torch.int32, device=self.device)
            self._static = _Rows(self.specs, max_batch, self.device)
            self._pinned: _Rows | None = None
            if self.device.type == "cuda":
                self._pinned = _Rows(self.specs, max_batch, torch.device("cpu"), pin_memory=True)
                self._copied = torch.cuda.Event()
        self._views: dict[Key, BatchView] = {}

    @property
    def n_active(self) -> torch.Tensor:
        """How many rows of the last staged batch are real: int32 [1] on the device."""
        return self._n_active

    def view(self, n: int, variant: Variant = DEFAULT) -> BatchView:
        """Return the first `n` rows of every buffer; the same object for the same arguments.

        Raises:
            TypeError: when `n` is not an integer.
            ValueError: unless 1 <= n <= max_batch.
        """
        n = self._as_size("n", n)
        key = Key(n, variant)
        view = self._views.get(key)
        if view is None:
            view = BatchView(self._static.head(n), n, self._n_active, variant)
            self._views[key] = view
        return view

    def stage(self, inputs: Mapping[str, object], n: int, bucket: int) -> None:
        """Copy `n` rows of each input into its buffer, and write padding into rows n..bucket.

        Host inputs have been read when this returns; device inputs are read in stream order.

        Args:
            inputs: for each buffer a tensor (CPU or the buffers' device) or sequence of numbers.
            n: real rows.
            bucket: rows that the step will see.

        Raises:
            TypeError, ValueError: when an input is missing, unknown, of another shape, dtype or
                device, or sizes are out of range; no buffer has been changed then.
        """
        bucket = self._as_size("bucket", bucket)
        n = as_integer("n", n)
        if not 1 <= n <= bucket:
            raise ValueError(f"n: got {n}, expected 1 to the bucket's {bucket}")
        checked = self._check_inputs(inputs, n)
        if self._pinned is not None:
            host = {name: value for name, value in checked.items() if value.is_cpu}
            checked = {name: value for name, value in checked.items() if name not in host}
            if host:
                self._copy_through(self._pinned, host, n, bucket)
        self._static.write(checked, n, bucket)
        self._n_active.fill_(n)

    def check(self, inputs: Mapping[str, object], n: int) -> None:
        """Raise what `stage` would raise for these inputs; no buffer is changed.

        Raises:
            TypeError, ValueError: see `stage`.
        """
        self._check_inputs(inputs, n)

    def stage_padding(self, bucket: int) -> None:
        """Write padding into the first `bucket` rows, none of them real.

        Raises:
            TypeError: when `bucket` is not an integer.
            ValueError: unless 1 <= bucket <= max_batch.
        """
        bucket = self._as_size("bucket", bucket)
        self._static.pad(0, bucket)
        self._n_active.fill_(0)

    def _copy_through(
        self, pinned: _Rows, inputs: Mapping[str, torch.Tensor], n: int, bucket: int
    ) -> None:
        # The device may still be reading the previous batch from the pinned memory.
        self._copied.synchronize()
        pinned.write(inputs, n, bucket)
        source, target = pinned.head(bucket), self._static.head(bucket)
        for name in inputs:
            target[name].copy_(source[name], non_blocking=True)
        self._copied.record(torch.cuda.current_stream(self.device))

    def _check_inputs(self, inputs: Mapping[str, object], n: int) -> dict[str, torch.Tensor]:
        if not isinstance(inputs, Mapping):
            raise TypeError(f"inputs: got {type(inputs).__name__}, expected a mapping")
        if inputs.keys() != self.specs.keys():
            missing = sorted(self.specs.keys() - inputs.keys())
            extra = sorted(map(str, inputs.keys() - self.specs.keys()))
            raise ValueError(
                f"inputs: missing {missing}, unknown {extra}; expected {sorted(self.specs)}"
            )
        return {
            name: as_rows(name, inputs[name], spec, n, self.device)
            for name, spec in self.specs.items()
        }

    def _as_size(self, argument: str, value: object) -> int:
        size = as_integer(argument, value)
        if not 1 <= size <= self.max_batch:
            raise ValueError(
                f"{argument}: got {size}, expected 1 to the buffers' max_batch={self.max_batch}"
            )
        return size


def _check_specs(specs: Mapping[Any, Any]) -> None:
    if not isinstance(specs, Mapping):
        raise TypeError(f"specs: got {type(specs).__name__}, expected a mapping")
    if not specs:
        raise ValueError("specs: got none, expected at least one buffer")
    for name, spec in specs.items():
        if not isinstance(name, str) or not name.isidentifier():
            raise ValueError(f"specs: got the name {name!r}, expected an identifier")
        if name in ("size", "n_active", "variant") or name.startswith("_"):
            raise ValueError(f"specs: got the name {name!r}, which every BatchView reserves")
        if not isinstance(spec, BufferSpec):
            raise TypeError(f"specs[{name!r}]: got {type(spec).__name__}, expected a BufferSpec")


def _resolve(device: torch.device | str) -> torch.device:
    device = torch.device(device)
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device: got {device}, expected cpu or cuda")
    if device == torch.device("cuda"):
        return torch.device("cuda", torch.cuda.current_device())
    return device
