"""Log-probabilities of tokens, on their way from the device to the caller."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .. import ops

MOST_LOGPROBS = 20  # best tokens that a request may ask for, as in OpenAI's API


@dataclass(frozen=True)
class TokenLogprobs:
    """How likely the model holds a token, and the best tokens in its place.

    Natural logarithms of the probabilities that the model itself gives: before the mask of a
    grammar, biases, penalties, temperature and filters.

    Attributes:
        logprob: of the token.
        top: ids and log-probabilities of the best tokens, as many as asked for, the best first.
    """

    logprob: float
    top: tuple[tuple[int, float], ...]


class HostLogprobs:
    """`ops.RowLogprobs` copied to the host, which may have to wait for them.

    Args:
        rows: what the current stream is computing.
    """

    def __init__(self, rows: ops.RowLogprobs) -> None:
        self._values, self._ids = _copied(rows.values), _copied(rows.ids)

    def read(self, row: int, wanted: int) -> TokenLogprobs:
        """Return a row, once the copies have happened; `wanted` best tokens at most."""
        chosen, *best = self._values[row].tolist()
        ids = self._ids[row].tolist()[:wanted]
        return TokenLogprobs(
            chosen, tuple((i, p) for i, p in zip(ids, best, strict=False) if i >= 0)
        )

    def __len__(self) -> int:
        return len(self._values)


def _copied(values: torch.Tensor) -> torch.Tensor:
    if not values.is_cuda:
        return values.clone()
    host = torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=True)
    return host.copy_(values, non_blocking=True)
