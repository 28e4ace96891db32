"""Static buffers: the memory a captured step reads its inputs from, and staging into it."""

from __future__ import annotations

import gc
import weakref
from collections import deque
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from .arguments import as_integer, at_least_one
from .buffer_spec import BufferSpec, as_rows
from .graph_key import DEFAULT, Key, Variant
from .packed_inputs import PackedInputs, as_words, is_whole_words, words_of
from .pinned_memory import pinned_words

_IN_FLIGHT = 2  # batches on their way from pinned memory
_MOST_MAPPED = 1 << 18  # bytes that a kernel copies from the host; beyond, a copy engine is better


class BatchView:
    """`size` rows of every buffer: what a step is called with.

    Each buffer is an attribute and an item of its name. The views are of static memory: the same
    addresses for every batch of this size, so that a captured graph finds its inputs.

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


class StaticBuffers:
    """Input buffers of a step, allocated once and never moved.

    Inputs from the host go through pinned memory, all of them in one copy, which takes what comes
    from the device along where it is made of 64-bit numbers. The pinned memory is written again
    only after the copy from it has finished; there are two blocks of it, so that a batch can be
    staged while the one before is waiting for the device. Copies run on torch's current stream.

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
        max_batch = at_least_one("max_batch", max_batch)
        self.device = _resolve(device)
        self.max_batch = max_batch
        self.specs: Mapping[str, BufferSpec] = MappingProxyType(dict(specs))
        # Made in inference mode they could not be written outside it.
        with torch.inference_mode(False):
            self._static = PackedInputs(self.specs, max_batch, self.device)
            self._static.pad(max_batch)
            self._pinned: deque[_Pinned] = deque()
            if self.device.type == "cuda":
                for _ in range(_IN_FLIGHT):
                    self._pinned.append(_Pinned(self.specs, max_batch, self.device))
                # The driver loads a kernel at its first launch, and then waits for the device.
                rows = self._static.batch(max_batch)
                _copy_all(rows, {name: row.clone() for name, row in rows.items()})
                words = self._static.pieces(1, 0, ())
                torch._foreach_copy_(words, [word.clone() for word in words])
        self._padding: dict[int, torch.Tensor] = {}
        self._views: dict[Key, BatchView] = {}
        self._user: weakref.ref[object] | None = None

    @property
    def n_active(self) -> torch.Tensor:
        """How many rows of the last staged batch are real: int32 [1] on the device."""
        return self._static.n_active

    def view(self, n: int, variant: Variant = DEFAULT) -> BatchView:
        """Return the buffers of a batch of `n` rows; the same object for the same arguments.

        What they hold is defined from `stage` or `stage_padding` of this size on, until that of
        another.

        Raises:
            TypeError: when `n` is not an integer.
            ValueError: unless 1 <= n <= max_batch.
        """
        n = self._as_size("n", n)
        key = Key(n, variant)
        view = self._views.get(key)
        if view is None:
            view = BatchView(self._static.batch(n), n, self.n_active, variant)
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
        checked = self.rows(inputs, n)
        if not self._pinned:
            self._write(self._static, checked, n, bucket)
            return
        on_device = {name: value for name, value in checked.items() if not value.is_cpu}
        if n < bucket or len(on_device) < len(checked):
            from_host = {name: value for name, value in checked.items() if value.is_cpu}
            on_device = self._copy_through_pinned(from_host, on_device, n, bucket)
        else:
            self.n_active.fill_(n)
        if on_device:
            _copy_all(self._static.head(bucket, n), on_device)

    def rows(self, inputs: Mapping[str, object], n: int) -> dict[str, torch.Tensor]:
        """Return each input as `n` rows, which may be the caller's tensor; no buffer is changed.

        What is a view of the buffers is copied: staging would write over it before it is read.

        Raises:
            TypeError, ValueError: see `stage`.
        """
        if not isinstance(inputs, Mapping):
            raise TypeError(f"inputs: got {type(inputs).__name__}, expected a mapping")
        if inputs.keys() != self.specs.keys():
            missing = sorted(self.specs.keys() - inputs.keys())
            extra = sorted(map(str, inputs.keys() - self.specs.keys()))
            raise ValueError(
                f"inputs: missing {missing}, unknown {extra}; expected {sorted(self.specs)}"
            )
        rows = {
            name: as_rows(name, inputs[name], spec, n, self.device)
            for name, spec in self.specs.items()
        }
        holds = self._static.holds
        return {name: row.clone() if holds(row) else row for name, row in rows.items()}

    def stage_padding(self, bucket: int) -> None:
        """Write padding into the first `bucket` rows, none of them real.

        Raises:
            TypeError: when `bucket` is not an integer.
            ValueError: unless 1 <= bucket <= max_batch.
        """
        bucket = self._as_size("bucket", bucket)
        self._static.pad(bucket)

    def claim(self, user: object) -> None:
        """Let a runner be the only one that stages here, until `release` or its end.

        Raises:
            ValueError: when another one is.
        """
        if self._is_claimed():
            gc.collect()  # a runner that was dropped without `close` is a reference cycle
        if self._is_claimed():
            raise ValueError(
                "buffers: got those of another GraphRunner, which both would write over; close "
                "that one first, or make other StaticBuffers"
            )
        self._user = weakref.ref(user)

    def release(self, user: object) -> None:
        """Let others claim the buffers, if `user` has done so."""
        if self._user is not None and self._user() is user:
            self._user = None

    def _is_claimed(self) -> bool:
        return self._user is not None and self._user() is not None

    def _copy_through_pinned(
        self,
        from_host: Mapping[str, torch.Tensor],
        on_device: dict[str, torch.Tensor],
        n: int,
        bucket: int,
    ) -> dict[str, torch.Tensor]:
        """Copy rows from the host, and padding; return those on the device still to be copied."""
        pinned = self._pinned[0]
        self._pinned.rotate()
        # The device may still be reading an earlier batch from it.
        pinned.copied.synchronize()
        self._write(pinned, from_host, n, bucket)
        packed = self._static.packed(bucket)
        if pinned.mapped is not None and packed.numel() <= _MOST_MAPPED:
            taken = {name: rows for name, rows in on_device.items() if is_whole_words(rows)}
            names, rows = tuple(taken), self._static.head(bucket, n)
            torch._foreach_copy_(
                [*self._static.pieces(bucket, n, names), *(as_words(rows[name]) for name in names)],
                [*pinned.mapped.pieces(bucket, n, names), *map(as_words, taken.values())],
            )
            on_device = {name: rows for name, rows in on_device.items() if name not in taken}
        else:
            packed.copy_(pinned.packed(bucket), non_blocking=True)
        pinned.copied.record(torch.cuda.current_stream(self.device))
        return on_device

    def _write(
        self, packed_inputs: PackedInputs, inputs: Mapping[str, torch.Tensor], n: int, bucket: int
    ) -> None:
        if n < bucket:
            packed_inputs.packed(bucket).copy_(self._padding_of(bucket))
        rows = packed_inputs.head(bucket, n)
        for name, value in inputs.items():
            rows[name].copy_(value)
        packed_inputs.n_active.fill_(n)

    def _padding_of(self, bucket: int) -> torch.Tensor:
        padding = self._padding.get(bucket)
        if padding is None:
            with torch.inference_mode(False):
                packed_inputs = PackedInputs(self.specs, bucket, torch.device("cpu"))
                packed_inputs.pad(bucket)
            padding = self._padding[bucket] = packed_inputs.packed(bucket)
        return padding

    def _as_size(self, argument: str, value: object) -> int:
        size = as_integer(argument, value)
        if not 1 <= size <= self.max_batch:
            raise ValueError(
                f"{argument}: got {size}, expected 1 to the buffers' max_batch={self.max_batch}"
            )
        return size


class _Pinned(PackedInputs):
    """Pinned memory of the host, and when it was last copied from.

    Attributes:
        mapped: the same memory, as kernels of the device read it; None where they cannot.
        copied: the end of the last copy.
    """

    def __init__(
        self, specs: Mapping[str, BufferSpec], max_batch: int, device: torch.device
    ) -> None:
        host, mapped = pinned_words(words_of(specs, max_batch), device)
        super().__init__(specs, max_batch, torch.device("cpu"), words=host)
        self.mapped = (
            None if mapped is None else PackedInputs(specs, max_batch, device, words=mapped)
        )
        self.copied = torch.cuda.Event()


_SIGNED = {
    torch.uint16: torch.int16,
    torch.uint32: torch.int32,
    torch.uint64: torch.int64,
}


def _copy_all(rows: Mapping[str, torch.Tensor], inputs: Mapping[str, torch.Tensor]) -> None:
    """Copy device inputs into their rows, those of one dtype in one launch."""
    by_dtype: dict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for name, value in inputs.items():
        row = rows[name]
        # On CUDA torch (2.11) has no such operator for unsigned numbers of more than a byte.
        if value.dtype in _SIGNED:
            value, row = (tensor.view(_SIGNED[tensor.dtype]) for tensor in (value, row))
        targets, sources = by_dtype.setdefault(value.dtype, ([], []))
        targets.append(row)
        sources.append(value)
    for targets, sources in by_dtype.values():
        torch._foreach_copy_(targets, sources)


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
    try:
        device = torch.device(device)
    except (TypeError, RuntimeError) as error:
        raise TypeError(f"device: got {device!r}, expected a device or its name") from error
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device: got {device}, expected cpu or cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device: got {device}, expected cpu: torch finds no GPU")
    if device == torch.device("cuda"):
        return torch.device("cuda", torch.cuda.current_device())
    return device
