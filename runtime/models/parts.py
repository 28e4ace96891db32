"""Parts of a decoder before it is loaded: their tensors, kernels, and share of a rank.

A family describes its layers by these parts. A part knows which tensors of a checkpoint it is made
of (in Hugging Face's names), which kernels it launches, and what one rank of a tensor-parallel
group keeps of it. How a linear module is stored is its `Scheme`'s business, in
`checkpoint/formats`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby
from typing import Any, Literal, Protocol, Self, TypeVar

import torch

from ..jit.variant import Variant
from ..ops.collective.communicator import Communicator
from .config_fields import UnsupportedModelError
from .experts.products import Experts
from .kinds import InputKind
from .layers import Layer, Linear
from .modules import Module, TensorSpec, share, uneven_share
from .norms import Norm, NormConfig
from .ranks import RowParallelLinear

# What ranks divide: outputs, or inputs, of which their results are added.
Divide = Literal["rows", "columns"]


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

    def experts_kernels(self, dtype: torch.dtype, *, out_dtype: torch.dtype) -> list[Variant]:
        """Return what grouped products launch; see `Experts.kernels`."""


AnyScheme = TypeVar("AnyScheme", bound=Scheme)


class SchemeOf(Protocol):
    """Maps a module to how it is stored."""

    def __call__(self, *names: str) -> Scheme:
        """Return it for a module that has these names, such as "model.layers.0.mlp.up_proj"."""


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
    """Makes tensors and layers of parts, from a checkpoint or at random.

    Attributes:
        communicator: joins the ranks whose parts these are; None for a model on one device.
    """

    @property
    def communicator(self) -> Communicator | None:
        """The ranks, of which the loaded layers add up or gather results."""

    def tensor(self, part: TensorPart) -> torch.Tensor:
        """Return what the part keeps, in the model's dtype."""

    def linear(self, part: LinearPart) -> Linear:
        """Return the layer of a part."""

    def experts(self, part: ExpertsPart) -> Experts:
        """Return the products of a part."""

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

    def found_in(self, holds: Callable[[TensorSpec], bool]) -> Self:
        """Return the part as a checkpoint stores it, of which `holds` knows the tensors."""
        return self

    def to_quantize(self) -> Iterator[Module]:
        """Yield the linear modules that a quantiser may store in 8 bits, as they are stored."""
        yield from ()


@dataclass(frozen=True)
class TensorPart(Part):
    """A tensor by itself: attention sinks, or a table of the vocabulary.

    Args:
        spec: of the stored tensor.
        divided: whether ranks divide its rows.
        uneven: whether the last rank may keep fewer rows than the others.
        kept_rows: what a rank keeps; None is all.
        dtype: that it is loaded in; None is that of the model.
    """

    spec: TensorSpec
    divided: bool = False
    uneven: bool = False
    kept_rows: slice | None = None
    dtype: torch.dtype | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of what is kept."""
        kept, (rows, *others) = self.kept_rows, self.spec.shape
        return (rows if kept is None else kept.stop - kept.start, *others)

    def tensors(self, scheme_of: SchemeOf) -> Iterator[TensorSpec]:
        """Yield the tensor."""
        yield self.spec

    def shard(self, rank: int, size: int) -> TensorPart:
        """Return all, or a rank's rows."""
        if not self.divided:
            return self
        rows, name = self.spec.shape[0], self.spec.name
        if self.uneven:
            return replace(self, kept_rows=uneven_share(name, rows, rank, size))
        return replace(self, kept_rows=share(name, rows, rows, rank, size))

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
        kept = share(name, heads, heads, rank, size, replicated=self.replicated)
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
        divide: what ranks divide.
        after: the field of the layer's parts that can take up factors of this layer's input: the
            norm in front, or the linear layer whose last rows give the input (up of [gate; up], v
            of [q; k; v]). None: there is none, or others read its results, too.
        chooses: whether it is a router or a gate: its results are fp32, every rank keeps it whole,
            and a quantiser leaves it as it is.
    """

    modules: tuple[Module, ...]
    kind: InputKind
    divide: Divide
    after: str | None = None
    chooses: bool = False

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
        if self.chooses:
            return self
        return replace(self, modules=_shares(self.modules, self.divide, rank, size))

    def to_quantize(self) -> Iterator[Module]:
        """Yield the modules, but for those of a router or a gate."""
        yield from () if self.chooses else self.modules

    def build(self, loader: Loader) -> Layer:
        """Return the layer, whose results are parts of sums where ranks divide inputs."""
        layer = loader.linear(self)
        if self.divide == "columns" and loader.communicator is not None:
            return RowParallelLinear(layer, loader.communicator)
        return layer


@dataclass(frozen=True)
class ExpertsPart(Part):
    """Linear modules of all experts of a layer, whose rows make one grouped product each.

    Args:
        modules: of each expert: gate_proj and up_proj, or down_proj.
        together: the name that the same modules have where a tensor [experts, rows, columns] holds
            those of all experts.
        gated: whether they are gate and up, whose rows ranks divide; of down they divide columns.
        transposable: whether these may be [experts, columns, rows] in 16 or 32 bits.
        stacked: whether the checkpoint has the tensors of `together`.
    """

    modules: tuple[tuple[Module, ...], ...]
    together: str
    gated: bool
    transposable: bool = False
    stacked: bool = False

    @property
    def num_experts(self) -> int:
        """How many products there are."""
        return len(self.modules)

    @property
    def shape(self) -> tuple[int, int]:
        """[N, K] of each expert."""
        first = self.modules[0]
        return sum(module.num_rows for module in first), first[0].num_columns

    def scheme(self, scheme_of: Callable[..., AnyScheme]) -> AnyScheme:
        """Return how all the modules are stored.

        Raises:
            UnsupportedModelError: naming two that are stored in different ways.
        """
        first, *others = (module.name for expert in self.modules for module in expert)
        scheme = scheme_of(first, self.together)
        for name in others:
            other = scheme_of(name, self.together)
            if other != scheme:
                raise UnsupportedModelError(
                    f"{name}: got {other}, expected the scheme of {first}, {scheme}: experts of a "
                    "layer are one grouped product"
                )
        return scheme

    def stored(self) -> Iterator[Module]:
        """Yield the modules in the order of their rows, each of which is read by itself."""
        if not self.stacked:
            for expert in self.modules:
                yield from expert
            return
        whole = self._whole()
        for index, expert in enumerate(self.modules):
            if all(module.kept_rows is None for module in expert):
                yield replace(whole, index=index, kept_columns=expert[0].kept_columns)
                continue
            first = 0
            for module in expert:
                kept = module.kept_rows or slice(0, module.rows)
                rows = slice(first + kept.start, first + kept.stop)
                yield replace(whole, index=index, kept_rows=rows)
                first += module.rows

    def products(self) -> Iterator[tuple[Module, ...]]:
        """Yield the modules of each expert, as `stored` yields them."""
        modules = tuple(self.stored())
        each = len(modules) // self.num_experts
        for first in range(0, len(modules), each):
            yield modules[first : first + each]

    def to_quantize(self) -> Iterator[Module]:
        """Yield the modules that tensors of the checkpoint hold: a stacked one is one."""
        if self.stacked:
            yield self._whole()
        else:
            yield from self.stored()

    def _whole(self) -> Module:
        """Return the module that holds all experts, stacked."""
        first = self.modules[0]
        rows = sum(module.rows for module in first)
        return Module(
            self.together,
            rows,
            first[0].columns,
            stacked=self.num_experts,
            transposable=self.transposable,
        )

    def found_in(self, holds: Callable[[TensorSpec], bool]) -> ExpertsPart:
        """Return the part with `stacked` as the checkpoint has it."""
        return replace(self, stacked=holds(self._whole().tensor("weight")))

    def tensors(self, scheme_of: SchemeOf) -> Iterator[TensorSpec]:
        """Yield every tensor, expert by expert."""
        scheme = self.scheme(scheme_of)
        for module in self.to_quantize():
            yield from scheme.tensors(module)

    def shard(self, rank: int, size: int) -> ExpertsPart:
        """Return a rank's rows or columns of every expert."""
        divide: Divide = "rows" if self.gated else "columns"
        shares = tuple(_shares(modules, divide, rank, size) for modules in self.modules)
        return replace(self, modules=shares)

    def build(self, loader: Loader) -> Experts:
        """Return the products."""
        return loader.experts(self)


def _shares(modules: Sequence[Module], divide: Divide, rank: int, size: int) -> tuple[Module, ...]:
    """Return a rank's rows or columns of modules of one layer."""
    of_module = Module.share_of_rows if divide == "rows" else Module.share_of_columns
    return tuple(chain.from_iterable(of_module(module, rank, size) for module in modules))
