"""From token ids to text as they come: whole characters only, and never a stop string."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from tokenizers import Tokenizer

# How many prompt tokens the decoder sees before the text, so that it knows whether the first
# word begins with a space.
_CONTEXT = 8
_CHARACTER_BYTES = 4  # at most, in UTF-8
# Tokens that may wait for later ones. Three bytes can; more do where a decoder joins texts of its
# own, and then not for ever.
_MOST_PENDING = 16
_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


class Detokenizer:
    """Incremental detokeniser of one request.

    The library's own `DecodeStream` raises when a byte-fallback token makes the bytes before it
    invalid, which a sampled text may do at any time.

    Args:
        tokenizer: of the model.
        prompt: ids before the text.
        stop: strings that end the text.
        hidden: ids that add no text though the tokenizer does not call them special, such as the
            model's end tokens.
        include_stop: end the text behind a stop string, not before it.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        stop: Sequence[str],
        hidden: Collection[int] = (),
        *,
        include_stop: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._hidden = hidden
        # Ids from the last complete character but one on: what follows depends on them only.
        self._window = self._end_of(prompt)
        self._window_shown = len(self._window)
        self._stop = stop
        self._include_stop = include_stop
        self._decoded = ""
        self._shown = 0
        self.stopped = False

    @property
    def text(self) -> str:
        """Everything shown so far."""
        return self._decoded[: self._shown]

    def push(self, token: int, *, last: bool = False, stoppable: bool = True) -> str:
        """Add a token and return what can be shown now; sets `stopped` at a stop string.

        Behind the `last` token nothing is held back, and of a text that is not `stoppable` yet no
        beginning of a stop string. After an error of the tokenizer the token has not been added.
        """
        if token in self._hidden:
            return self.finish() if last else ""
        self._window.append(token)
        try:
            fresh = self._undecoded(len(self._window))
            silent = not fresh and self._is_silent(token)
            decided = self._decided(fresh, last=last)
            if self._window_shown < decided < len(self._window):
                fresh = self._undecoded(decided)
        except BaseException:
            self._window.pop()
            raise
        if silent:
            self._window.pop()  # or every token behind many of them would take long
        elif decided > self._window_shown:
            self._decoded += fresh
            self._window = self._window[self._window_shown :]
            self._window_shown = decided - self._window_shown
        if not stoppable:
            return self._show(len(self._decoded))
        return self._show(self._end() if last else self._safe_end())

    def finish(self) -> str:
        """Return what was held back, as the text has ended; may set `stopped` too."""
        if self.stopped:
            return ""
        self._decoded += self._undecoded(len(self._window))
        self._window_shown = len(self._window)
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

    def _undecoded(self, end: int) -> str:
        """Return the text of the window's new ids up to `end`, perhaps with half a character."""
        shown = self._decode(self._window[: self._window_shown])
        text = self._decode(self._window[:end])
        if not text.startswith(shown):
            shown = shown.rstrip(_INCOMPLETE)  # a character that the prompt has only begun
        return text[len(shown) :]

    def _decided(self, fresh: str, *, last: bool) -> int:
        """Return up to which id of the window no later id can change the text.

        Where the text ends in U+FFFD, that may be half a character, whose other half can still
        come, or be what the text says: bytes that are no character, or U+FFFD itself. A character
        has four bytes at most and a token at least one, so that text behind which there are three
        tokens stays, if it does not end within a character.

        Args:
            fresh: the text of the new ids.
            last: whether no id follows.
        """
        new = len(self._window)
        if not fresh:
            return self._window_shown
        if last or not fresh.endswith(_INCOMPLETE) or new - self._window_shown > _MOST_PENDING:
            return new
        whole = self._decode(self._window)
        for end in range(new - _CHARACTER_BYTES + 1, self._window_shown, -1):
            if self._decode(self._window[:end]) + self._decode(self._window[end:]) == whole:
                return end
        return self._window_shown

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
        if not found:
            return None
        behind, start = min(found)
        return behind if self._include_stop else start

    def _show(self, end: int) -> str:
        piece = self._decoded[self._shown : end]
        self._shown = end
        return piece
