"""What a weight format says of a module, and what it reads modules with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from ...jit.variant import Variant
from ...models.experts.products import Experts
from ...models.layers import Linear
from ...models.modules import Module, TensorSpec
from ...models.parts import ExpertsPart, Scheme
from ..errors import CheckpointError, UnsupportedCheckpointError
from ..finite import is_finite
from ..reader import CheckpointReader, require_finite


@dataclass(frozen=True)
class Target:
    """Where a layer is loaded to.

    Args:
        device: of its tensors.
        dtype: of the model: of unquantised weights and of what layers read.
        batch_invariant: as of `load_model`.
        out_dtype: of biases and outputs; None is `dtype`.
    """

    device: torch.device
    dtype: torch.dtype
    batch_invariant: bool
    out_dtype: torch.dtype | None = None

    @property
    def results(self) -> torch.dtype:
        """The dtype of biases and outputs."""
        return self.dtype if self.out_dtype is None else self.out_dtype


class StoredScheme(Scheme, Protocol):
    """A `Scheme` that can be read. Schemes inherit what is not their own."""

    def input_factors(self, module: Module) -> TensorSpec | None:
        """Return factors [columns] of the module's input, which a file may hold, or None."""
        return None

    def check_shares(self, modules: Sequence[Module]) -> None:
        """Check what a rank keeps of the modules of one product, reading nothing.

        Raises:
            UnsupportedCheckpointError: naming a module, where it divides what has one scale.
        """
        return

    def build(self, reader: CheckpointReader, modules: Sequence[Module], target: Target) -> Linear:
        """Return the layer whose rows are those of the modules, one after another.

        Raises:
            CheckpointError: naming the file and the tensor, for values that are no numbers.
        """

    def build_experts(self, reader: CheckpointReader, part: ExpertsPart, target: Target) -> Experts:
        """Return the grouped products of a part.

        Raises:
            CheckpointError: as `build`.
            UnsupportedCheckpointError: where experts cannot be stored so.
        """
        raise UnsupportedCheckpointError(
            f"{part.together}: got {self}, expected experts in a scheme that has grouped products"
        )

    def experts_kernels(self, dtype: torch.dtype, *, out_dtype: torch.dtype) -> list[Variant]:
        """Return what grouped products launch; see `Experts.kernels`.

        Args:
            dtype: of the model.
            out_dtype: of results.
        """
        return []


@dataclass(frozen=True)
class Kept:
    """A tensor of a checkpoint, and which rows and columns of it are kept; None is all."""

    spec: TensorSpec
    rows: slice | None = None
    columns: slice | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of what is kept."""
        kept = (self.rows, self.columns)
        return tuple(
            size if part is None else part.stop - part.start
            for size, part in zip(self.spec.shape, (*kept, *(None,) * 2), strict=False)
        )

    def read(self, reader: CheckpointReader) -> torch.Tensor:
        """Return it, backed by the file."""
        stored = reader.read(self.spec).reshape(self.spec.shape)
        if self.rows is not None:
            stored = stored[self.rows]
        return stored if self.columns is None else stored[:, self.columns]


def stack(
    reader: CheckpointReader, parts: Sequence[Kept], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Return tensors one under another, in memory of their own.

    Raises:
        CheckpointError: naming the file and the tensor, for NaN, an infinity, or numbers beyond
            the range of `dtype`.
    """
    sizes = [part.shape[0] for part in parts]
    stacked = torch.empty((sum(sizes), *parts[0].shape[1:]), dtype=dtype, device=device)
    for part, rows in zip(parts, stacked.split(sizes), strict=True):
        stored = part.read(reader)
        rows.copy_(stored)
        if not is_finite(rows):
            require_finite(reader, part.spec)
            raise CheckpointError(
                f"{reader.where(part.spec)}: holds numbers beyond the range of {dtype}; "
                f"load it as {stored.dtype}"
            )
    return stacked


def biases(
    reader: CheckpointReader, modules: Sequence[Module], target: Target
) -> torch.Tensor | None:
    """Return the biases of modules one after another, zeros for those without; None for none."""
    if not any(module.has_bias and module.keeps_bias for module in modules):
        return None
    found = []
    for module in modules:
        if module.bias is not None and module.keeps_bias:
            kept = Kept(module.bias, module.kept_rows)
            found.append(stack(reader, [kept], target.results, target.device))
        else:
            found.append(torch.zeros(module.num_rows, dtype=target.results, device=target.device))
    return torch.cat(found)


def weight_of(module: Module, spec: TensorSpec) -> Kept:
    """Return a weight [rows, columns] of a module, as far as it is kept."""
    return Kept(spec, module.kept_rows, module.kept_columns)
