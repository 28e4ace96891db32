"""Models that ranks divide, as threads of one process: their twins of processes on GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ostinato.checkpoint import load_model
from ostinato.models import Decoder, sequence_logits
from ostinato.ops.collective.communicator import Communicator, local_communicators, run_ranks

TIMEOUT_S = 60.0  # against hanging, on however slow a machine


def load_ranks(folder: Path, size: int, **options: Any) -> list[Decoder]:
    """Return the share of each rank of a checkpoint; options are those of `load_model`."""
    ranks = local_communicators(size, timeout_s=TIMEOUT_S)
    return run_ranks(ranks, lambda rank: load_model(folder, communicator=rank, **options))


def rank_logits(models: Sequence[Decoder], tokens: Sequence[int]) -> list[torch.Tensor]:
    """Return the logits that each rank computes."""
    by_rank = {model.communicator: model for model in models}

    def logits(rank: Communicator) -> torch.Tensor:
        with torch.inference_mode():
            return sequence_logits(by_rank[rank], tokens)

    return run_ranks(list(by_rank), logits)


def logits_of_ranks(folder: Path, size: int, tokens: Sequence[int], **options: Any) -> torch.Tensor:
    """Return the logits that all ranks compute, once it is checked that they are equal."""
    first, *others = rank_logits(load_ranks(folder, size, **options), tokens)
    assert all(torch.equal(first, other) for other in others)
    return first
