"""From token ids to text as they come: whole characters only, and never a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer

# How many prompt tokens the decoder sees before the text, so that it knows whether the first
# word begins with a space.
_CONTEXT = 8
_CHARACTER_BYTES = 4  # at most, in UTF-8
_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


class Detokenizer:
    """Incremental detokeniser of one request.

    The library's own `DecodeStream` raises when a byte-fallback token makes the bytes before it
    invalid, which a sampled text may do at any time.

    Args:
        tokenizer: of the model.
        prompt: ids before the text.
        stop: strings that end the text.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stop: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        # Ids from the last complete character but one on: what follows depends on them only.
        self._window = self._end_of(prompt)
        self._window_shown = len(self._window)
        self._stop = stop
        self._decoded = ""
        self._shown = 0
        self.stopped = False

    @property
    def text(self) -> str:
        """Everything shown so far."""
        return self._decoded[: self._shown]

    def push(self, token: int, *, last: bool = False) -> str:
        """Add a token and return what can be shown now; sets `stopped` at a stop string.

        Behind the `last` token nothing is held back. After an error of the tokenizer the token has
        not been added.
        """
        self._window.append(token)
        try:
            fresh = self._undecoded()
            silent = not fresh and self._is_silent(token)
        except BaseException:
            self._window.pop()
            raise
        if silent:
            self._window.pop()  # or every token behind many of them would take long
        if fresh and (last or not fresh.endswith(_INCOMPLETE)):
            self._decoded += fresh
            self._window = self._window[self._window_shown :]
            self._window_shown = len(self._window)
        return self._show(self._end() if last else self._safe_end())

    def finish(self) -> str:
        """Return what was held back, as the text has ended; may set `stopped` too."""
        if self.stopped:
            return ""
        self._decoded += self._undecoded()
        return self._show(self._end())

    def _end_of(self, prompt: Sequence[int]) -> list[int]:
        """Return the last ids of a prompt, beginning where a character does.

        Where bytes are tokens a decoder makes nothing of a run of them that begins within one.
        """
        for more in range(_CHARACTER_BYTES):
            window = list(prompt[-_CONTEXT - more :])
            if not self._decode(window).startswith(_INCOMPLETE):
                return window
        return list(prompt[-_CONTEXT:])

    def _undecoded(self) -> str:
        """Return the text of the window's new ids, its last character perhaps incomplete."""
        shown = self._decode(self._window[: self._window_shown])
        text = self._decode(self._window)
        if not text.startswith(shown):
            shown = shown.rstrip(_INCOMPLETE)  # a character that the prompt has only begun
        return text[len(shown) :]

    def _is_silent(self, token: int) -> bool:
        """Return whether decoding leaves a token out, whatever is beside it."""
        if self._tokenizer.id_to_token(token) is None:
            return True
        spoken: str = self._tokenizer.decode([token], skip_special_tokens=False)
        return spoken != "" and self._decode([token]) == ""

    def _decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True)
        return text

    def _end(self) -> int:
        """Return where the text ends if no more comes; sets `stopped` at a stop string."""
        end = self._stop_at()
        self.stopped = end is not None
        return len(self._decoded) if end is None else end

    def _safe_end(self) -> int:
        end = self._end()
        if self.stopped:
            return end
        held = 0
        for stop in self._stop:
            longest = min(len(stop) - 1, len(self._decoded) - self._shown)
            for length in range(longest, held, -1):
                if self._decoded.endswith(stop[:length]):
                    held = length
                    break
        return end - held

    def _stop_at(self) -> int | None:
        """Return where the stop string begins that is complete first, if there is one."""
        # A stop string never begins in what has been shown: its beginning was held back.
        starts = ((self._decoded.find(stop, self._shown), len(stop)) for stop in self._stop)
        found = [(start + length, start) for start, length in starts if start >= 0]
        return min(found)[1] if found else None

    def _show(self, end: int) -> str:
        piece = self._decoded[self._shown : end]
        self._shown = end
        return piece
