"""Linear modules and tensors of a checkpoint, and what one rank of several keeps of a module."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from .config_fields import UnsupportedModelError

DENSE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class TensorSpec:
    """A tensor of a checkpoint: its possible names, shapes and dtypes.

    With an `index` it is one entry of the first dimension of the stored tensor, whose `shapes`
    these are. One that is `transposable` may be stored with its last two dimensions exchanged.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...] = DENSE_DTYPES
    required: bool = True
    index: int | None = None
    transposable: bool = False

    @property
    def name(self) -> str:
        """The name that messages use."""
        return self.names[0]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape that the model uses."""
        return self.shapes[0] if self.index is None else self.shapes[0][1:]


@dataclass(frozen=True)
class Section:
    """Adjacent rows of a stored weight that ranks divide by themselves, such as k of [q; k; v].

    Args:
        rows: how many there are.
        units: as of a `Module`.
        replicated: likewise.
    """

    rows: int
    units: int = 0
    replicated: bool = False


@dataclass(frozen=True)
class Module:
    """One linear module of a checkpoint: y = x·Wᵀ (+ b), W [rows, columns].

    Args:
        name: such as "model.layers.0.self_attn.q_proj".
        rows, columns: of the stored weight.
        has_bias: whether there is a bias [rows].
        units: equal groups of rows that ranks do not divide, such as heads; 0: every row is one.
        replicated: whether several ranks may keep the same unit, as of KV heads.
        column_units: likewise of columns.
        sections: what the rows are, one after another, where ranks divide them one by one.
        uneven: whether the last rank may keep fewer rows than the others, as of a vocabulary.
        kept_rows, kept_columns: what a rank keeps; None is all.
        keeps_bias: whether a rank adds the bias.
        stacked: how many modules of this shape the stored tensors hold, as of experts; 0: this one.
        index: which of these it is; None is all of them.
        transposable: whether a stacked weight may be stored [stacked, columns, rows].
    """

    name: str
    rows: int
    columns: int
    has_bias: bool = False
    units: int = 0
    replicated: bool = False
    column_units: int = 0
    sections: tuple[Section, ...] = ()
    uneven: bool = False
    kept_rows: slice | None = None
    kept_columns: slice | None = None
    keeps_bias: bool = True
    stacked: int = 0
    index: int | None = None
    transposable: bool = False

    def tensor(
        self,
        kinds: str | tuple[str, ...],
        *shapes: tuple[int, ...],
        dtypes: tuple[torch.dtype, ...] = DENSE_DTYPES,
        required: bool = True,
    ) -> TensorSpec:
        """Return a tensor of the module.

        Args:
            kinds: what it is called behind the module's name, such as "weight_scale": one name or
                several. Stacked tensors may have no dot before it, and no "weight" at all.
            shapes: that it may have, without the dimension of stacked modules.
            dtypes: likewise.
            required: whether a checkpoint must hold it.
        """
        kinds = (kinds,) if isinstance(kinds, str) else kinds
        names = [f"{self.name}.{kind}" for kind in kinds]
        if self.stacked:
            names += [f"{self.name}_{kind}".replace("_weight", "", 1) for kind in kinds]
            shapes = tuple((self.stacked, *shape) for shape in shapes)
        return TensorSpec(tuple(names), shapes, dtypes, required, self.index)

    @property
    def bias(self) -> TensorSpec | None:
        """The bias, None where there is none."""
        return self.tensor("bias", (self.rows,)) if self.has_bias else None

    @property
    def num_rows(self) -> int:
        """Rows that are kept."""
        return self.rows if self.kept_rows is None else _length(self.kept_rows)

    @property
    def num_columns(self) -> int:
        """Columns that are kept."""
        return self.columns if self.kept_columns is None else _length(self.kept_columns)

    def share_of_rows(self, rank: int, size: int) -> tuple[Module, ...]:
        """Return what a rank keeps, section by section, where ranks divide outputs."""
        if self.uneven:
            return (replace(self, kept_rows=uneven_share(self.name, self.rows, rank, size)),)
        shares, first = [], 0
        for section in self.sections or (Section(self.rows, self.units, self.replicated),):
            units, replicated = section.units or section.rows, section.replicated
            kept = share(self.name, section.rows, units, rank, size, replicated=replicated)
            shares.append(replace(self, kept_rows=slice(first + kept.start, first + kept.stop)))
            first += section.rows
        return tuple(shares)

    def share_of_columns(self, rank: int, size: int) -> tuple[Module, ...]:
        """Return what a rank keeps where ranks divide inputs, so that their results are added."""
        units = self.column_units or self.columns
        kept = share(self.name, self.columns, units, rank, size, of="columns")
        return (replace(self, kept_columns=kept, keeps_bias=rank == 0),)


def share(
    name: str,
    length: int,
    units: int,
    rank: int,
    size: int,
    *,
    replicated: bool = False,
    of: str = "rows",
) -> slice:
    """Return a rank's part of `length` rows or columns, in whole units.

    Args:
        name: of the tensor or module.
        length: of all ranks' parts.
        units: how many equal ones there are.
        rank: this one.
        size: how many ranks there are.
        replicated: whether several ranks may keep the same unit.
        of: "rows" or "columns", for messages.

    Raises:
        UnsupportedModelError: naming the tensor or module, where ranks cannot divide them.
    """
    width = length // units
    if units % size == 0:
        count = units // size
        return slice(rank * count * width, (rank + 1) * count * width)
    if replicated and size % units == 0:
        unit = rank * units // size
        return slice(unit * width, (unit + 1) * width)
    got = f"{units} {of}" if width == 1 else f"{units} groups of {width} {of}"
    expected = f"a multiple of {size}{' or a divisor of it' if replicated else ''}"
    raise UnsupportedModelError(f"{name}: got {got} for {size} ranks, expected {expected}")


def uneven_width(length: int, size: int) -> int:
    """Return how many of `length` rows each rank but the last keeps, if ranks may differ."""
    return -(-length // size)


def uneven_share(name: str, length: int, rank: int, size: int) -> slice:
    """Return a rank's part of `length` rows, of which the last rank may have fewer than the others.

    Raises:
        UnsupportedModelError: naming the tensor or module, where the last rank would have none.
    """
    width = uneven_width(length, size)
    if width * (size - 1) >= length:
        raise UnsupportedModelError(
            f"{name}: got {length} rows for {size} ranks, expected some for the last rank where "
            f"the others have {width} each"
        )
    return slice(rank * width, min(length, (rank + 1) * width))


def _length(kept: slice) -> int:
    return int(kept.stop - kept.start)
