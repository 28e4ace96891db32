"""Layers and norms of one rank of several: what makes ranks' results those of the whole model."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch.nn import functional

from ..jit.variant import Variant
from ..ops.collective.communicator import Communicator
from ..ops.collective.partial_sum import PartialSum
from .kinds import Activation, InputKind
from .layers import Layer, Linear
from .modules import uneven_width
from .norms import Addend, Norm


def ranks_of(communicator: Communicator | None, device: torch.device) -> Communicator | None:
    """Return the communicator of a model on a device, None where there is one rank alone.

    Raises:
        TypeError, ValueError: for one that is none, or is of another device.
    """
    if communicator is None:
        return None
    if not isinstance(communicator, Communicator):
        raise TypeError(f"communicator: got {communicator!r}, expected a Communicator or None")
    if device == torch.device("cuda"):  # without an index
        device = torch.device("cuda", torch.cuda.current_device())
    if communicator.device != device:
        raise ValueError(
            f"communicator: got one of {communicator.device}, expected that of the model, {device}"
        )
    return None if communicator.size == 1 else communicator


@dataclass
class _ShareOfLayer(Layer):
    """What is this rank's of a layer: `linear`, whose results others' make whole."""

    linear: Linear
    communicator: Communicator

    @property
    def shape(self) -> tuple[int, int]:
        """[N, K] of this rank's weight."""
        return self.linear.shape

    @property
    def weight_dtype(self) -> torch.dtype:
        return self.linear.weight_dtype

    def kernels(self, kind: InputKind, dtype: torch.dtype) -> list[Variant]:
        """Return those of this rank's layer; those of collectives are the communicator's."""
        return self.linear.kernels(kind, dtype)


@dataclass
class RowParallelLinear(_ShareOfLayer):
    """A layer of whose inputs this rank has some: all ranks' results add up to y.

    `linear` reads this rank's columns of x. The sum is left to what reads it, so that it can be
    one launch with the norm that follows.
    """

    def __call__(self, x: torch.Tensor, n_active: torch.Tensor | None = None) -> PartialSum:
        return PartialSum(self.linear(x, n_active), self.communicator)

    def after_activation(
        self, x: torch.Tensor, kind: Activation, n_active: torch.Tensor | None = None
    ) -> PartialSum:
        return PartialSum(self.linear.after_activation(x, kind, n_active), self.communicator)


@dataclass
class GatheredHead(_ShareOfLayer, Linear):
    """An output projection of whose rows this rank has some: each gets the logits of all.

    `linear` has this rank's rows of [vocab_size, K], of which the last rank's may be fewer.
    """

    vocab_size: int

    def __call__(self, x: torch.Tensor, n_active: torch.Tensor | None = None) -> torch.Tensor:
        return self._gathered(self.linear(x, n_active))

    def after_norm(
        self,
        x: Addend,
        residual: torch.Tensor | None,
        norm: Norm,
        n_active: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        y, total = self.linear.after_norm(x, residual, norm, n_active)
        return self._gathered(y), total

    def after_activation(
        self, x: torch.Tensor, kind: Activation, n_active: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self._gathered(self.linear.after_activation(x, kind, n_active))

    def scaled(self, norm: Norm, factor: float) -> tuple[Linear, Norm]:
        linear, norm = self.linear.scaled(norm, factor)
        return replace(self, linear=linear), norm

    def _gathered(self, y: torch.Tensor) -> torch.Tensor:
        """Return the columns of all ranks [M, vocab_size], of this rank's y [M, N]."""
        width = uneven_width(self.vocab_size, self.communicator.size)
        if y.size(1) < width:
            y = functional.pad(y, (0, width - y.size(1)))
        # Padding comes last.
        return self.communicator.all_gather(y)[:, : self.vocab_size]


@dataclass(frozen=True, kw_only=True)
class NormOverRanks(Norm):
    """A norm of rows [M, K] that ranks divide; `weight` [K] is that of all columns.

    `kept` are this rank's columns. Several ranks may keep the same.
    """

    kept: slice
    communicator: Communicator

    def of_gathered(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's columns, normalised, of those [M, ranks, kept] of all ranks."""
        # Neighbouring ranks that keep the same columns count once.
        copies = x.size(1) * x.size(2) // self.weight.size(0)
        return self(x[:, ::copies].flatten(1))[:, self.kept]


def normalized_heads(
    q_norm: Norm, k_norm: Norm, q: torch.Tensor, k: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return q and k, normalised over all heads, of which ranks may have some each."""
    if not isinstance(q_norm, NormOverRanks) or not isinstance(k_norm, NormOverRanks):
        return q_norm(q), k_norm(k)
    ranks = q_norm.communicator
    gathered = ranks.all_gather(torch.cat([q, k], dim=1)).unflatten(1, (ranks.size, -1))
    every_q, every_k = gathered.split([q.size(1), k.size(1)], dim=2)
    return q_norm.of_gathered(every_q), k_norm.of_gathered(every_k)
