"""Rows, lengths and pages of the sequences whose prompts one captured call computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class PrefillBatchViews:
    """`cu_seqlens` [n + 1], `seq_lens` [n] and `page_table` [n, max_pages] of n sequences, int32.

    They mean what they mean in `AttentionInputs`.
    """

    cu_seqlens: torch.Tensor
    seq_lens: torch.Tensor
    page_table: torch.Tensor


class PrefillBatch:
    """`PrefillBatchViews` in one tensor at a fixed address, written by a single copy.

    Args:
        most: sequences.
        max_pages: of each.
        device: where it is.
    """

    def __init__(self, most: int, max_pages: int, device: torch.device) -> None:
        self.most = most
        self._max_pages = max_pages
        # Made in inference mode it could not be written outside it.
        with torch.inference_mode(False):
            words = (most + 1) + most + most * max_pages
            self._memory = torch.zeros(words, dtype=torch.int32, device=device)
        self._read: torch.cuda.Event | None = None  # the end of what reads it

    @property
    def memory(self) -> torch.Tensor:
        """All of it."""
        return self._memory

    def first(self, count: int) -> PrefillBatchViews:
        """Return the memory of the first `count` sequences, or of all."""
        count = min(count, self.most)
        table = 2 * self.most + 1
        return PrefillBatchViews(
            self._memory[: count + 1],
            self._memory[self.most + 1 :][:count],
            self._memory[table:].view(self.most, self._max_pages)[:count],
        )

    def write(
        self, cu_seqlens: Sequence[int], seq_lens: Sequence[int], page_table: torch.Tensor
    ) -> None:
        """Write n sequences; those behind them are empty.

        Args:
            cu_seqlens: [n + 1], where each one's rows begin and end.
            seq_lens: [n], their lengths.
            page_table: [n, max_pages] int32 on the host.
        """
        empty = self.most - len(seq_lens)
        lengths = [*cu_seqlens, *[cu_seqlens[-1]] * empty, *seq_lens, *[0] * empty]
        words = torch.cat([torch.tensor(lengths, dtype=torch.int32), page_table.flatten()])
        target = self._memory[: len(words)]
        if target.is_cuda:
            if self._read is not None:  # on another stream, perhaps
                self._read.wait(torch.cuda.current_stream(target.device))
            words = words.pin_memory()
        target.copy_(words, non_blocking=True)

    def used(self) -> None:
        """Note that the current stream has been given what reads the memory."""
        if self._memory.is_cuda:
            self._read = self._read or torch.cuda.Event()
            self._read.record(torch.cuda.current_stream(self._memory.device))
