"""A sum over ranks that has not been made yet."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .communicator import Communicator


@dataclass(frozen=True)
class PartialSum:
    """What one rank adds to a sum over all ranks.

    A linear layer whose input is divided among ranks returns it, and so does an embedding whose
    vocabulary is. What comes next makes the sum, together with its own work where it can: the
    residual, the norm and the quantisation after an all-reduce are one launch.

    Args:
        values: [T, H] of this rank.
        communicator: of this rank.
    """

    values: torch.Tensor
    communicator: Communicator

    def sum(self) -> torch.Tensor:
        """Return the sum over ranks [T, H]: a collective, see `ops.all_reduce`."""
        return self.communicator.all_reduce(self.values)
