"""What each process of the tests over gloo does, for forks of a server to import."""

from __future__ import annotations

from typing import Any

import torch
from rank_processes import results_of_processes

from ostinato.ops.collective import peers
from ostinato.ops.collective.communicator import Communicator, GroupCommunicator

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def share(rank: int, rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Return what a rank adds: sums in another order, or rounded twice, have other bits."""
    generator = torch.Generator().manual_seed(1000 * rank + width)
    scale = 10.0 ** torch.randint(-3, 4, (rows, width), generator=generator)
    return (torch.randn(rows, width, generator=generator) * scale).to(dtype)


def in_order(parts: list[torch.Tensor]) -> torch.Tensor:
    """Return the sum as it is meant: fp32, element by element from rank 0 on, rounded once."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts[0].dtype)


def reduce_and_gather(communicator: Communicator) -> dict[str, Any]:
    """Return sums and concatenations of every dtype, and those of rows by themselves."""
    found: dict[str, Any] = {}
    for dtype in DTYPES:
        x = share(communicator.rank, 5, 48, dtype)
        found[f"sum {dtype}"] = communicator.all_reduce(x)
        found[f"row {dtype}"] = communicator.all_reduce(x[3:4])
        found[f"columns {dtype}"] = communicator.all_gather(x[:, :7])
    return found


def tell() -> dict[str, Any]:
    """Return these, and numbers of all ranks, as bytes."""
    ranks = GroupCommunicator()
    told = reduce_and_gather(ranks)
    told["numbers"] = torch.tensor(peers._of_all_ranks(ranks, [ranks.rank, 7]))
    return {name: value.view(torch.uint8).numpy() for name, value in told.items()}


def over_gloo(size: int) -> list[dict[str, Any]]:
    """Return what the ranks of `size` processes tell, in rank order."""
    return results_of_processes(size, tell, preload=["ostinato.ops", "torch.distributed"])
