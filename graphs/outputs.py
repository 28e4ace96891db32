"""What a step returns: a tensor, or a tuple or dict of them, with a row per row of the batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch.utils._pytree import TreeSpec, tree_flatten

from .buffers import BatchView
from .kept import keep

StepOutput = torch.Tensor | tuple[torch.Tensor, ...] | dict[str, torch.Tensor]
Step = Callable[[BatchView], StepOutput]
_Pack = Callable[[list[torch.Tensor]], Any]
_Place = tuple[torch.Tensor, torch.Size, tuple[int, ...], int]  # its shape, strides and address
_PackedRows = tuple[Any, list[_Place]]  # and where each of them was when it was made


class Outputs:
    """The tensors that one call of a step returned, and how they were packed.

    Attributes:
        names: of each tensor, as written in messages: `output`, `output[0]`, `output['logits']`.
        tensors: in the same order; the first dimension is the batch size.
    """

    def __init__(self, names: Sequence[str], tensors: Sequence[torch.Tensor], pack: _Pack) -> None:
        self.names = tuple(names)
        self.tensors = tuple(tensors)
        self._pack = pack
        self._rows: dict[int, _PackedRows] = {}

    @classmethod
    def of(cls, value: object, batch: BatchView) -> Outputs:
        """Wrap what a step returned for `batch`.

        Raises:
            TypeError: unless it is a tensor, or a non-empty tuple or dict of tensors, which may be
                of any class that torch's pytrees know (named tuples, transformers' ModelOutput).
            ValueError: when a tensor lacks the batch dimension or is on another device.
        """
        if isinstance(value, torch.Tensor):
            outputs = cls(("output",), (value,), itemgetter(0))
        else:
            labels, tensors, spec = _taken_apart(value)
            names = [f"output[{label!r}]" for label in labels]
            outputs = cls(names, tensors, spec.unflatten)
        if not outputs.tensors:
            raise TypeError("step: returned no tensor, expected at least one")
        for name, tensor in zip(outputs.names, outputs.tensors, strict=True):
            _check_output(name, tensor, batch)
        return outputs

    def like(self, tensors: Sequence[torch.Tensor]) -> Outputs:
        """Return other tensors packed as these are."""
        return Outputs(self.names, tensors, self._pack)

    def rows(self, n: int) -> Any:
        """Return the first `n` rows of each tensor, packed as the step packed them.

        The tensors are mostly the same for the same `n`, since making them would take as long as
        all else that a run does on the host; one that a caller has made another of in place is made
        anew.
        """
        packed, places = self._rows.get(n) or self._make_rows(n)
        if any(_place_of(place[0]) != place for place in places):
            packed, places = self._make_rows(n)
        if type(packed) is dict:
            return packed.copy()
        # What a caller changes in one of another class must not be seen later, either.
        return self._pack([place[0] for place in places]) if isinstance(packed, dict) else packed

    def kept(self, n: int) -> _PackedRows:
        """Return what `rows` keeps of the same `n`: the packed rows, and each with its place."""
        return self._rows[n]

    def _make_rows(self, n: int) -> _PackedRows:
        with torch.inference_mode(False):
            rows = [tensor.narrow(0, 0, n) for tensor in self.tensors]
        made = self._pack(rows), [_place_of(row) for row in rows]
        keep(self._rows, n, made)
        return made

    def layout(self) -> list[tuple[str, torch.Size, torch.dtype]]:
        """Return the name, shape and dtype of each tensor."""
        return [
            (name, tensor.shape, tensor.dtype)
            for name, tensor in zip(self.names, self.tensors, strict=True)
        ]


def _taken_apart(value: object) -> tuple[Sequence[object], list[Any], TreeSpec]:
    """Return the labels of what a tuple or dict holds, what that is, and how it is put together.

    Raises:
        TypeError: for anything else, and for classes of which torch's pytrees do not know that.
    """
    labels: Sequence[object] | None = None
    if isinstance(value, tuple):
        labels = range(len(value))
    elif isinstance(value, dict) and all(isinstance(key, str) for key in value):
        labels = list(value)
    if labels is not None:
        held, spec = tree_flatten(value, is_leaf=lambda inner: inner is not value)
        if not spec.is_leaf():
            return labels, held, spec
    raise TypeError(
        f"step: returned {type(value).__name__}, expected a tensor, a tuple of tensors or a dict "
        "of strings to tensors; of a class of its own only if torch.utils._pytree knows it"
    )


def _place_of(row: torch.Tensor) -> _Place:
    return row, row.shape, row.stride(), row.data_ptr()


def _check_output(name: str, tensor: object, batch: BatchView) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"step: {name} is {type(tensor).__name__}, expected a tensor")
    if tensor.dim() == 0 or tensor.size(0) != batch.size:
        raise ValueError(
            f"step: {name} has shape {tuple(tensor.shape)}, expected a row for each of "
            f"{batch.size} rows of the batch"
        )
    if tensor.device != batch.n_active.device:
        raise ValueError(f"step: {name} is on {tensor.device}, expected {batch.n_active.device}")
