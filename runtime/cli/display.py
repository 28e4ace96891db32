"""Texts that grow side by side, shown one below the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TextIO

_HEADER_WIDTH = 72


class TextDisplay:
    """Prints many growing texts readably: in the order of the prompts, each under its own header.

    The first unfinished text is shown token by token; what the later ones have by then is shown
    when their turn comes. A single text has no header, so that it can be piped on.

    Args:
        prompts: whose texts are shown.
        out: where to.
    """

    def __init__(self, prompts: Sequence[str], out: TextIO) -> None:
        self._prompts = prompts
        self._out = out
        self._held = [""] * len(prompts)
        self._finished = [False] * len(prompts)
        self._current = 0
        self._begun = False

    def add(self, index: int, text: str, *, finished: bool) -> None:
        """Add `text` to that of prompt `index`; `finished` when nothing follows."""
        self._held[index] += text
        self._finished[index] = finished
        while self._current < len(self._prompts):
            self._show()
            if not self._finished[self._current]:
                break
            self._next()
        self._out.flush()

    def cut_short(self) -> None:
        """Show what the unfinished texts have so far."""
        while self._current < len(self._prompts):
            if self._held[self._current] or self._finished[self._current]:
                self._show()
            self._next()
        self._out.flush()

    def _show(self) -> None:
        if not self._begun:
            self._begun = True
            if len(self._prompts) > 1:
                separator = "\n" if self._current else ""
                self._out.write(f"{separator}{self._header()}\n")
        self._out.write(self._held[self._current])
        self._held[self._current] = ""

    def _next(self) -> None:
        if self._begun:
            self._out.write("\n")
        self._begun = False
        self._current += 1

    def _header(self) -> str:
        prompt = " ".join(self._prompts[self._current].split())
        if len(prompt) > _HEADER_WIDTH:
            prompt = prompt[: _HEADER_WIDTH - 1] + "…"
        return f"==> {self._current + 1}/{len(self._prompts)}: {prompt}"
