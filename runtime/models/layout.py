"""The layout of a decoder: its parts, layer by layer, and what is done with all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

from .modules import Module, TensorSpec
from .parts import ExpertsPart, LinearPart, NormPart, Part, SchemeOf, TensorPart


@dataclass(frozen=True)
class DecoderLayout:
    """The parts of a decoder.

    Args:
        embedding: [vocab_size, hidden_size].
        layers: a dataclass of parts for each layer, as the family declares it.
        norm: of the last layer's output.
        lm_head: the output projection; None where it shares the embedding's weight.
        tied_output: the copy of the embedding that a file of such a model may hold.
        unused: how names of tensors begin that files may hold and the decoder has no use for.
    """

    embedding: TensorPart
    layers: tuple[Any, ...]
    norm: NormPart
    lm_head: LinearPart | None
    tied_output: TensorPart | None = None
    unused: tuple[str, ...] = ()

    def parts(self) -> Iterator[Part]:
        """Yield every part, in the order in which the decoder uses them."""
        for node in (self.embedding, *self.layers, self.norm, self.lm_head, self.tied_output):
            yield from parts_of(node)

    def linears(self) -> Iterator[LinearPart]:
        """Yield every linear layer."""
        return (part for part in self.parts() if isinstance(part, LinearPart))

    def experts(self) -> Iterator[ExpertsPart]:
        """Yield the grouped products of every mixture of experts."""
        return (part for part in self.parts() if isinstance(part, ExpertsPart))

    def to_quantize(self) -> Iterator[Module]:
        """Yield every linear module that a quantiser may store in 8 bits."""
        for part in self.parts():
            yield from part.to_quantize()

    def tensors(self, scheme_of: SchemeOf) -> Iterator[TensorSpec]:
        """Yield every tensor of a checkpoint whose linear modules are stored so."""
        for part in self.parts():
            yield from part.tensors(scheme_of)

    def shard(self, rank: int, size: int) -> DecoderLayout:
        """Return the parts of one rank; see `Part.shard`."""
        if size < 1 or not 0 <= rank < size:
            raise ValueError(f"rank: got {rank} of {size}, expected 0 to size - 1")
        return self._each(lambda part: part.shard(rank, size))

    def found_in(self, holds: Callable[[TensorSpec], bool]) -> DecoderLayout:
        """Return the parts as a checkpoint stores them; see `Part.found_in`."""
        return self._each(lambda part: part.found_in(holds))

    def _each(self, change: Callable[[Part], Part]) -> DecoderLayout:
        names = ("embedding", "layers", "norm", "lm_head", "tied_output")
        return replace(self, **{name: changed(getattr(self, name), change) for name in names})


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


def changed(node: Any, change: Callable[[Part], Part]) -> Any:
    """Return a dataclass, a tuple or None with each part within replaced by `change` of it."""
    if node is None:
        return None
    if isinstance(node, Part):
        return change(node)
    if isinstance(node, tuple):
        return tuple(changed(item, change) for item in node)
    return replace(node, **{f.name: changed(getattr(node, f.name), change) for f in fields(node)})


def shard(node: Any, rank: int, size: int) -> Any:
    """Return a dataclass, a tuple or None with each part within replaced by a rank's."""
    return changed(node, lambda part: part.shard(rank, size))
