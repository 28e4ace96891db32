"""Rows, lengths and pages of the sequences that one captured call with prompts computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..models import TextRows


class _Words:
    """int32 words at a fixed address on a device, which the host writes beside the device's work.

    Args:
        count: of them.
        device: where they are.
    """

    def __init__(self, count: int, device: torch.device) -> None:
        # Made in inference mode it could not be written outside it.
        with torch.inference_mode(False):
            self.memory = torch.zeros(count, dtype=torch.int32, device=device)
        self._read: torch.cuda.Event | None = None  # the end of what reads it

    def _write_words(self, words: torch.Tensor) -> None:
        """Write the first of them, after what has been given to the stream of `used`."""
        target = self.memory[: len(words)]
        if target.is_cuda:
            if self._read is not None:  # on another stream, perhaps
                self._read.wait(torch.cuda.current_stream(target.device))
            words = words.pin_memory()
        target.copy_(words, non_blocking=True)

    def used(self) -> None:
        """Note that the current stream has been given what reads them."""
        if self.memory.is_cuda:
            self._read = self._read or torch.cuda.Event()
            self._read.record(torch.cuda.current_stream(self.memory.device))


@dataclass(frozen=True)
class PrefillBatchViews:
    """`cu_seqlens` [n + 1], `seq_lens` [n] and `page_table` [n, max_pages] of n sequences, int32.

    They mean what they mean in `AttentionInputs`.
    """

    cu_seqlens: torch.Tensor
    seq_lens: torch.Tensor
    page_table: torch.Tensor


class PrefillBatch(_Words):
    """`PrefillBatchViews` of prompts in one tensor at a fixed address, written by a single copy.

    Args:
        most: sequences.
        max_pages: of each.
        device: where it is.
    """

    def __init__(self, most: int, max_pages: int, device: torch.device) -> None:
        super().__init__((most + 1) + most + most * max_pages, device)
        self.most = most
        self._max_pages = max_pages

    def first(self, count: int) -> PrefillBatchViews:
        """Return the memory of the first `count` sequences, or of all."""
        count = min(count, self.most)
        table = 2 * self.most + 1
        return PrefillBatchViews(
            self.memory[: count + 1],
            self.memory[self.most + 1 :][:count],
            self.memory[table:].view(self.most, self._max_pages)[:count],
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
        self._write_words(
            torch.cat([torch.tensor(lengths, dtype=torch.int32), page_table.flatten()])
        )


class TextBatch(_Words):
    """`TextRows` of the texts that a call computes beside prompts, likewise.

    Args:
        most: texts.
        max_pages: of each.
        device: where it is.
    """

    def __init__(self, most: int, max_pages: int, device: torch.device) -> None:
        super().__init__(most + most * max_pages, device)
        self.most = most
        self._max_pages = max_pages

    def first(self, count: int) -> TextRows:
        """Return the memory of the first `count` texts, or of all."""
        count = min(count, self.most)
        table = self.memory[self.most :].view(self.most, self._max_pages)
        return TextRows(table[:count], self.memory[:count])

    def write(self, seq_lens: torch.Tensor, page_table: torch.Tensor) -> None:
        """Write n texts; those behind them are none.

        Args:
            seq_lens: [n] int32 on the host.
            page_table: [n, max_pages] likewise.
        """
        lengths = torch.zeros(self.most, dtype=torch.int32)
        lengths[: len(seq_lens)] = seq_lens
        self._write_words(torch.cat([lengths, page_table.flatten()]))
