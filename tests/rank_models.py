"""Models that ranks divide, as threads of one process: the twins of those of several processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rank_processes import results_of_processes

from ostinato.checkpoint import load_model
from ostinato.models import Decoder, sequence_logits
from ostinato.ops.collective.communicator import (
    Communicator,
    GroupCommunicator,
    local_communicators,
    run_ranks,
)
from ostinato.ops.collective.peers import local_peers

TIMEOUT_S = 120.0  # against hanging, on however slow a machine


def load_ranks(
    folder: Path, size: int, device: torch.device | str = "cpu", **options: Any
) -> list[Decoder]:
    """Return the share of each rank of a checkpoint; options are those of `load_model`.

    Ranks on a GPU share it.
    """
    if torch.device(device).type == "cuda":
        ranks = local_peers(size, timeout_s=TIMEOUT_S)
        launch_together(ranks)
    else:
        ranks = local_communicators(size, timeout_s=TIMEOUT_S)
    return run_ranks(
        ranks, lambda rank: load_model(folder, device=rank.device, communicator=rank, **options)
    )


def launch_together(ranks: Sequence[Any]) -> None:
    """Have the ranks of one GPU launch a collective when all have come to it.

    One that waits on the GPU for another would wait in vain if the other's next kernel were
    launched for the first time: CUDA loads it when the GPU has nothing left to do. Ranks with a GPU
    each need no such care.
    """

    def met(rank: Any, launch: Callable[..., None], *args: Any, **given: Any) -> None:
        torch.cuda.current_stream().synchronize()
        rank._meet()
        launch(*args, **given)

    for rank in ranks:
        rank._launch = partial(met, rank, rank._launch)


def rank_logits(models: Sequence[Decoder], tokens: Sequence[int]) -> list[torch.Tensor]:
    """Return the logits that each rank computes."""
    by_rank = {model.communicator: model for model in models}

    def logits(rank: Communicator) -> torch.Tensor:
        with torch.inference_mode():
            if rank.device.type == "cpu":
                return sequence_logits(by_rank[rank], tokens)
            # Kernels that wait for those of other ranks are not in one stream with them.
            stream = torch.cuda.Stream(rank.device)
            with torch.cuda.stream(stream):
                found = sequence_logits(by_rank[rank], tokens)
            stream.synchronize()
            return found

    return run_ranks(list(by_rank), logits)


def logits_of_ranks(folder: Path, size: int, tokens: Sequence[int], **options: Any) -> torch.Tensor:
    """Return the logits that all ranks compute, once it is checked that they are equal."""
    first, *others = rank_logits(load_ranks(folder, size, **options), tokens)
    assert all(torch.equal(first, other) for other in others)
    return first


def logits_of_processes(folder: Path, size: int, tokens: Sequence[int]) -> list[torch.Tensor]:
    """Return the logits of ranks that are processes, over gloo."""
    found = results_of_processes(size, _logits, folder, tokens, preload=["rank_models"])
    return [torch.from_numpy(logits) for logits in found]


def _logits(folder: Path, tokens: Sequence[int]) -> Any:
    model = load_model(folder, communicator=GroupCommunicator())
    with torch.inference_mode():
        return sequence_logits(model, tokens).numpy()
