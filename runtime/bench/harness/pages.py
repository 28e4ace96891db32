"""Pages of sequences in a cache: a random table, and where the last page of each one ends."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def random_pages(lengths: Sequence[int], page: int) -> tuple[int, torch.Tensor]:
    """Return how many pages sequences of these lengths have, and a table of them, permuted.

    The table [sequences, pages of the longest] int32 is on the CPU; what is left of a row is 0.
    """
    counts = torch.tensor([-(-length // page) for length in lengths])
    total, widest = int(counts.sum()), int(counts.max())
    table = torch.zeros(len(lengths), widest, dtype=torch.int32)
    table[torch.arange(widest) < counts[:, None]] = torch.randperm(total, dtype=torch.int32)
    return total, table


def partial_pages(lengths: Sequence[int], page: int, table: torch.Tensor) -> list[tuple[int, int]]:
    """Return each page that a sequence fills in part, and how many tokens of it are in use."""
    return [
        (int(table[sequence, length // page]), length % page)
        for sequence, length in enumerate(lengths)
        if length % page
    ]
