"""Parts of a decoder before it is loaded: their tensors, kernels, and share of a rank.

A family describes its layers by these parts. A part knows which tensors of a checkpoint it is made
of (in Hugging Face's names), which kernels it launches, and what one rank of a tensor-parallel
group keeps of it. How a linear module is stored is its `Scheme`'s business, in
`checkpoint/formats`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from itertools import groupby
from typing import Any, Literal, Protocol, Self, TypeVar

import torch

from ..jit.variant import Variant
from .config_fields import UnsupportedModelError
from .kinds import InputKind
from .layers import Linear
from .norms import Norm, NormConfig

DENSE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class TensorSpec:
    """A tensor of a checkpoint: its possible names, shapes and dtypes."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...] = DENSE_DTYPES
    required: bool = True

    @property
    def name(self) -> str:
        """The name that messages use."""
        return self.names[0]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape that the model uses."""
        return self.shapes[0]


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
        kept_rows, kept_columns: what a rank keeps; None is all.
        keeps_bias: whether a rank adds the bias.
    """

    name: str
    rows: int
    columns: int
    has_bias: bool = False
    units: int = 0
    replicated: bool = False
    column_units: int = 0
    kept_rows: slice | None = None
    kept_columns: slice | None = None
    keeps_bias: bool = True

    @property
    def bias(self) -> TensorSpec | None:
        """The bias, None where there is none."""
        return TensorSpec((f"{self.name}.bias",), ((self.rows,),)) if self.has_bias else None

    @property
    def num_rows(self) -> int:
        """Rows that are kept."""
        return self.rows if self.kept_rows is None else _length(self.kept_rows)

    @property
    def num_columns(self) -> int:
        """Columns that are kept."""
        return self.columns if self.kept_columns is None else _length(self.kept_columns)

    def share_of_rows(self, rank: int, size: int) -> Module:
        """Return what a rank keeps where outputs are divided among ranks."""
        units = self.units or self.rows
        kept = _share(self.name, self.rows, units, rank, size, replicated=self.replicated)
        return replace(self, kept_rows=kept)

    def share_of_columns(self, rank: int, size: int) -> Module:
        """Return what a rank keeps where inputs are divided: ranks' results are added."""
        kept = _share(self.name, self.columns, self.column_units or self.columns, rank, size)
        return replace(self, kept_columns=kept, keeps_bias=rank == 0)


class Scheme(Protocol):
    """How a linear module is stored. Modules of equal schemes can be one product."""

    def tensors(self, module: Module) -> Iterator[TensorSpec]:
        """Yield every tensor of a module; the weight is the first."""

    def kernels(
        self,
        kind: InputKind,
        shape: tuple[int, int],
        dtype: torch.dtype,
        *,
        batch_invariant: bool,
        device: torch.device | None,
        out_dtype: torch.dtype | None = None,
    ) -> list[Variant]:
        """Return what a layer [N, K] of this kind launches; see `Linear.kernels`.

        Its results are of `out_dtype`, by default that of the model.
        """


AnyScheme = TypeVar("AnyScheme", bound=Scheme)

# Maps a module's name, such as "model.layers.0.mlp.up_proj", to how it is stored.
SchemeOf = Callable[[str], Scheme]


@dataclass(frozen=True)
class InputFactors:
    """Factors of the columns of a layer's input.

    Args:
        values: [K] fp32 on the CPU, finite and above 0, not all of them 1.
        where: the file and the tensor that hold them, for messages.
    """

    values: torch.Tensor
    where: str


class Loader(Protocol):
    """Makes tensors and layers of parts, from a checkpoint or at random."""

    def tensor(self, part: TensorPart) -> torch.Tensor:
        """Return what the part keeps, in the model's dtype."""

    def linear(self, part: LinearPart) -> Linear:
        """Return the layer of a part."""

    def input_factors(self, part: LinearPart) -> InputFactors | None:
        """Return what the stored weight of a layer needs its input multiplied by, None for 1."""

    def head(self, part: LinearPart | None, embedding: torch.Tensor) -> Linear:
        """Return the output projection, whose results are fp32.

        None is one that shares the embedding's weight.
        """


class Part(ABC):
    """A piece of a decoder that is loaded at once."""

    @abstractmethod
    def tensors(self, scheme_of: SchemeOf) -> Iterator[TensorSpec]:
        """Yield every tensor of the part."""

    @abstractmethod
    def shard(self, rank: int, size: int) -> Self:
        """Return what rank `rank` of `size` keeps.

        Raises:
            UnsupportedModelError: naming the module, when it cannot be divided so.
        """

    @abstractmethod
    def build(self, loader: Loader) -> Any:
        """Return the part as the decoder uses it."""


@dataclass(frozen=True)
class TensorPart(Part):
    """A tensor by itself: attention sinks, or a table of the vocabulary.

    Args:
        spec: of the stored tensor.
        divided: whether ranks divide its rows.
        kept_rows: what a rank keeps; None is all.
    """

    spec: TensorSpec
    divided: bool = False
    kept_rows: slice | None = None

    def tensors(self, scheme_of: SchemeOf) -> Iterator[TensorSpec]:
        """Yield the tensor."""
        yield self.spec

    def shard(self, rank: int, size: int) -> TensorPart:
        """Return all, or a rank's rows."""
        if not self.divided:
            return self
        rows = self.spec.shape[0]
        return replace(self, kept_rows=_share(self.spec.name, rows, rows, rank, size))

    def build(self, loader: Loader) -> torch.Tensor:
        """Return the tensor."""
        return loader.tensor(self)


@dataclass(frozen=True)
class NormPart(Part):
    """A norm, which every rank keeps whole, or one with weights for each head.

    Args:
        weight: of the stored weight.
        bias: of the stored bias, None where there is none.
        config: of the norm.
        of_heads: whether there is a row of weights for each head, which ranks divide.
        replicated: whether several ranks may keep the same head.
        kept_rows: what a rank keeps; None is all.
    """

    weight: TensorSpec
    bias: TensorSpec | None
    config: NormConfig
    of_heads: bool = False
    replicated: bool = False
    kept_rows: slice | None = None

    def tensors(self, scheme_of: SchemeOf) -> Iterator[TensorSpec]:
        """Yield weight and bias."""
        yield self.weight
        if self.bias is not None:
            yield self.bias

    def shard(self, rank: int, size: int) -> NormPart:
        """Return all, or a rank's heads."""
        if not self.of_heads:
            return self
        name, heads = self.weight.name, self.weight.shape[0]
        kept = _share(name, heads, heads, rank, size, replicated=self.replicated)
        return replace(self, kept_rows=kept)

    def build(self, loader: Loader) -> Norm:
        """Return the norm; a weight that is stored less 1 becomes fp32, which holds the sum."""
        weight = TensorPart(self.weight, kept_rows=self.kept_rows).build(loader)
        if self.config.plus_one:
            weight = weight.float() + 1.0
        bias = None
        if self.bias is not None:
            bias = TensorPart(self.bias, kept_rows=self.kept_rows).build(loader).to(weight.dtype)
        return Norm(weight, self.config.eps, self.config.kind, bias)


@dataclass(frozen=True)
class LinearPart(Part):
    """Linear modules whose rows, one after another, make one layer.

    Those that are stored alike are one product.

    Args:
        modules: such as q_proj, k_proj and v_proj.
        kind: what comes before the layer, and is fused with quantising its input.
        divide: what ranks divide: "rows" (outputs) or "columns" (inputs, whose ranks' results are
            added).
        after: the field of the layer's parts that can take up factors of this layer's input: the
            norm in front, or the linear layer whose last rows give the input (up of [gate; up], v
            of [q; k; v]). None: there is none, or others read its results, too.
    """

    modules: tuple[Module, ...]
    kind: InputKind
    divide: Literal["rows", "columns"]
    after: str | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """[N, K] of the layer."""
        return sum(module.num_rows for module in self.modules), self.modules[0].num_columns

    def runs(self, scheme_of: Callable[[str], AnyScheme]) -> list[tuple[AnyScheme, LinearPart]]:
        """Return runs of adjacent modules that are stored alike: each is a product of its own."""
        runs = groupby(self.modules, lambda module: scheme_of(module.name))
        return [(scheme, replace(self, modules=tuple(modules))) for scheme, modules in runs]

    def tensors(self, scheme_of: SchemeOf) -> Iterator[TensorSpec]:
        """Yield every tensor, module by module."""
        for module in self.modules:
            yield from scheme_of(module.name).tensors(module)

    def shard(self, rank: int, size: int) -> LinearPart:
        """Return a rank's rows or columns of every module."""
        share = Module.share_of_rows if self.divide == "rows" else Module.share_of_columns
        return replace(self, modules=tuple(share(module, rank, size) for module in self.modules))

    def build(self, loader: Loader) -> Linear:
        """Return the layer."""
        return loader.linear(self)


@dataclass(frozen=True)
class DecoderLayout:
    """The parts of a decoder.

    Args:
        embedding: [vocab_size, hidden_size].
        layers: a dataclass of parts for each layer, as the family declares it.
        norm: of the last layer's output.
        lm_head: the output projection; None where it shares the embedding's weight.
        tied_output: the copy of the embedding that a file of such a model may hold.
    """

    embedding: TensorPart
    layers: tuple[Any, ...]
    norm: NormPart
    lm_head: LinearPart | None
    tied_output: TensorPart | None = None

    def parts(self) -> Iterator[Part]:
        """Yield every part, in the order in which the decoder uses them."""
        yield from parts_of(self)

    def linears(self) -> Iterator[LinearPart]:
        """Yield every linear layer."""
        return (part for part in self.parts() if isinstance(part, LinearPart))

    def tensors(self, scheme_of: SchemeOf) -> Iterator[TensorSpec]:
        """Yield every tensor of a checkpoint whose linear modules are stored so."""
        for part in self.parts():
            yield from part.tensors(scheme_of)

    def shard(self, rank: int, size: int) -> DecoderLayout:
        """Return the parts of one rank; see `Part.shard`."""
        if size < 1 or not 0 <= rank < size:
            raise ValueError(f"rank: got {rank} of {size}, expected 0 to size - 1")
        found: DecoderLayout = shard(self, rank, size)
        return found


def parts_of(node: Any) -> Iterator[Part]:
    """Yield the parts within a dataclass, a tuple or None, in the order of its fields."""
    if isinstance(node, Part):
        yield node
    elif isinstance(node, tuple):
        for item in node:
            yield from parts_of(item)
    elif node is not None:
        for field in fields(node):
            yield from parts_of(getattr(node, field.name))


def shard(node: Any, rank: int, size: int) -> Any:
    """Return a dataclass, a tuple or None with each part within replaced by a rank's."""
    if node is None:
        return None
    if isinstance(node, Part):
        return node.shard(rank, size)
    if isinstance(node, tuple):
        return tuple(shard(item, rank, size) for item in node)
    return replace(node, **{f.name: shard(getattr(node, f.name), rank, size) for f in fields(node)})


def _share(
    name: str, length: int, units: int, rank: int, size: int, *, replicated: bool = False
) -> slice:
    """Return a rank's part of `length` rows or columns, in whole units."""
    width = length // units
    if units % size == 0:
        count = units // size
        return slice(rank * count * width, (rank + 1) * count * width)
    if replicated and size % units == 0:
        unit = rank * units // size
        return slice(unit * width, (unit + 1) * width)
    raise UnsupportedModelError(f"{name}: got {units} for {size} ranks, expected a multiple of it")


def _length(kept: slice) -> int:
    return int(kept.stop - kept.start)
