"""From token ids to text as they come: whole characters only, and never a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

# How many prompt tokens the decoder sees before the text, so that it knows whether the first
# word begins with a space.
_CONTEXT = 8


class TextStream:
    """Incremental detokeniser of one request.

    Args:
        tokenizer: of the model.
        prompt: ids before the text.
        stop: strings that end the text.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stop: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._ids = list(prompt[-_CONTEXT:])
        self._stream = DecodeStream(ids=list(self._ids), skip_special_tokens=True)
        self._base = tokenizer.decode(self._ids, skip_special_tokens=True)
        self._stop = stop
        self._decoded = ""
        self._shown = 0
        self.stopped = False

    @property
    def text(self) -> str:
        """Everything shown so far."""
        return self._decoded[: self._shown]

    def push(self, token: int) -> str:
        """Add a token and return what can be shown now; sets `stopped` at a stop string."""
        self._ids.append(token)
        self._decoded += self._stream.step(self._tokenizer, token) or ""
        return self._show(self._safe_end())

    def finish(self) -> str:
        """Return what was held back: the text has ended, so it begins no stop string."""
        if self.stopped:
            return ""
        whole = self._tokenizer.decode(self._ids, skip_special_tokens=True)
        if whole.startswith(self._base + self._decoded):
            self._decoded = whole[len(self._base) :]
        end = self._stop_at()
        return self._show(len(self._decoded) if end is None else end)

    def _safe_end(self) -> int:
        end = self._stop_at()
        if end is not None:
            self.stopped = True
            return end
        held = 0
        for stop in self._stop:
            longest = min(len(stop) - 1, len(self._decoded))
            for length in range(longest, held, -1):
                if self._decoded.endswith(stop[:length]):
                    held = length
                    break
        # A held-back tail may not reach into what has been shown.
        return max(len(self._decoded) - held, self._shown)

    def _stop_at(self) -> int | None:
        # Shown text holds no stop string, but one may have begun in it only if it was shown
        # before its stop could be known, which holding back prevents: search the rest.
        found = [at for at in (self._decoded.find(s, self._shown) for s in self._stop) if at >= 0]
        return min(found, default=None)

    def _show(self, end: int) -> str:
        piece = self._decoded[self._shown : end]
        self._shown = end
        return piece
