"""What a burst and the host share: limits on the device, tokens in the host's memory.

All of it is 64-bit words, laid out as advance.cu reads and writes them.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence

import torch

from .rules import BurstRules

# Control: the step, the number of rows, then for each row its limit (0 once it has ended), the
# number of its stop tokens, and those.
STEP, ROWS, CONTROL_HEAD = 0, 1, 2
# Ring: steps whose tokens are there, whether the burst has ended, whether the host wants it to, and
# a spare word. Then the length and the reason of each row that has ended, and a line for each step:
# when it was done, and a token for each row.
PUBLISHED, DONE, CANCEL, RING_HEAD = 0, 1, 2, 4
# Why a row has ended.
REASONS = (None, "stop", "limit", "full", "cancelled")
STOP, LIMIT, FULL, CANCELLED = 1, 2, 3, 4


class BurstMemory:
    """Memory of the bursts of one runner, one of them at a time.

    Args:
        rules: their `max_steps` and `max_stops` say how much.
        max_batch: rows.
        device: where the step runs.
    """

    def __init__(self, rules: BurstRules, max_batch: int, device: torch.device) -> None:
        self.max_batch = max_batch
        self.row_words = 2 + rules.max_stops
        pinned = device.type == "cuda"

        def words(count: int, pin: bool, place: torch.device | str = "cpu") -> torch.Tensor:
            return torch.zeros(count, dtype=torch.int64, device=place, pin_memory=pin)

        size = CONTROL_HEAD + max_batch * self.row_words
        # Made in inference mode they could not be written outside it.
        with torch.inference_mode(False):
            self.control = words(size, False, device)
            self._staged = words(size, pinned)
            # Pinned memory is mapped: the device writes to it under the host's address.
            self.ring = words(self._line(rules.max_steps), pinned)
        self._words = (ctypes.c_int64 * self.ring.numel()).from_address(self.ring.data_ptr())

    def start(self, limits: Sequence[int], stops: Sequence[Sequence[int]]) -> None:
        """Write what a burst begins with, on torch's current stream. No burst may be running."""
        n = len(limits)
        words = [0, n]
        for limit, tokens in zip(limits, stops, strict=True):
            spare = self.row_words - 2 - len(tokens)
            words += [limit, len(tokens), *tokens, *[0] * spare]
        self._staged[: len(words)] = torch.tensor(words, device="cpu")
        self.ring[: RING_HEAD + 2 * self.max_batch] = 0
        self.control[: len(words)].copy_(self._staged[: len(words)], non_blocking=True)

    @property
    def published(self) -> int:
        """Steps whose tokens can be read."""
        return int(self._words[PUBLISHED])

    @property
    def done(self) -> bool:
        """Whether the burst has ended: nothing of the ring changes any more."""
        return bool(self._words[DONE])

    def cancel(self) -> None:
        """Ask the burst to end with the step under way."""
        self._words[CANCEL] = 1

    @property
    def cancelled(self) -> bool:
        """Whether `cancel` was called."""
        return bool(self._words[CANCEL])

    def tokens(self, step: int, n: int) -> list[int]:
        """Return the tokens of a published step; those of rows that had ended mean nothing."""
        start = self._line(step) + 1
        return list(self._words[start : start + n])

    def time_ns(self, step: int) -> int:
        """Return when a published step was done, by the clock of whoever took it."""
        return int(self._words[self._line(step)])

    def lengths(self, n: int) -> list[int]:
        """Return how many tokens each row has in all; 0 for one that has not ended."""
        return list(self._words[RING_HEAD : RING_HEAD + n])

    def reasons(self, n: int) -> list[str | None]:
        """Return why each row has ended; None for one that has not."""
        start = RING_HEAD + self.max_batch
        return [REASONS[word] for word in self._words[start : start + n]]

    def end_row(self, row: int, length: int, reason: int) -> None:
        """Write that a row has ended, as the kernel does."""
        self._words[RING_HEAD + row] = length
        self._words[RING_HEAD + self.max_batch + row] = reason

    def end(self) -> None:
        """Write that the burst has ended, as the kernel does."""
        self._words[DONE] = 1

    def publish(self, step: int, tokens: Sequence[int], *, done: bool) -> None:
        """Write the tokens of a step, as the kernel does."""
        start = self._line(step)
        self._words[start] = time.perf_counter_ns()
        self._words[start + 1 : start + 1 + len(tokens)] = list(tokens)
        self._words[PUBLISHED] = step + 1
        self._words[DONE] = int(done)

    def _line(self, step: int) -> int:
        return RING_HEAD + 2 * self.max_batch + step * (1 + self.max_batch)
