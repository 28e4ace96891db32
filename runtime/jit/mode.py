"""Build modes: the release build, and the workshop's builds for debugging."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from .sources import read_all

_SITE = re.compile(r"\bOSTINATO_DELAY\(\s*([A-Za-z_]\w*)\s*,")
_PRINT = re.compile(r"\bOSTINATO_PRINT\(|\bkDebugPrint\b")


@dataclass(frozen=True)
class BuildMode:
    """How a variant is compiled; see csrc/common/debug.cuh and docs/workshop.md.

    `debug_print` compiles device printing in. `delay_site` names the hand-over between warps
    before which a delay is injected.
    """

    debug_print: bool = False
    delay_site: str | None = None

    @staticmethod
    def from_environment(environment: Mapping[str, str] = os.environ) -> BuildMode:
        """Return the mode that OSTINATO_DEBUG_PRINT=1 and OSTINATO_DELAY_SITE=SITE ask for."""
        return BuildMode(
            debug_print=environment.get("OSTINATO_DEBUG_PRINT", "0") not in ("", "0"),
            delay_site=environment.get("OSTINATO_DELAY_SITE") or None,
        )

    def check(self, argument: str) -> None:
        """Check that some kernel has the delay site: an injected delay must not go missing.

        Raises:
            ValueError: naming the argument and the known sites.
        """
        if self.delay_site is not None:
            known = set().union(*map(delay_sites, read_all()))
            if self.delay_site not in known:
                expected = " or ".join(sorted(known))
                raise ValueError(f"{argument}: got {self.delay_site!r}, expected {expected}")

    def restricted_to(self, texts: Iterable[str]) -> BuildMode:
        """Return the mode without what changes nothing in these sources (less debug.cuh)."""
        joined, mode = "\n".join(texts), self
        if self.delay_site is not None and self.delay_site not in delay_sites(joined):
            mode = replace(mode, delay_site=None)
        if self.debug_print and not _PRINT.search(joined):
            mode = replace(mode, debug_print=False)
        return mode

    def defines(self) -> dict[str, str]:
        """Return the macros that select the mode."""
        chosen = {}
        if self.debug_print:
            chosen["OSTINATO_DEBUG_PRINT"] = "1"
        if self.delay_site is not None:
            chosen["OSTINATO_DELAY_SITE"] = self.delay_site
        return chosen

    def __str__(self) -> str:
        words = ["debug-print"] if self.debug_print else []
        if self.delay_site is not None:
            words.append(f"inject-delay {self.delay_site}")
        return ", ".join(words) or "release"

    @property
    def flags(self) -> str:
        """The flags of `python -m ostinato build` that select the mode, each after a space."""
        return ("" if not self.debug_print else " --debug-print") + (
            "" if self.delay_site is None else f" --inject-delay {self.delay_site}"
        )


RELEASE = BuildMode()


def delay_sites(text: str) -> set[str]:
    """Return the names of the delay sites in a source other than debug.cuh."""
    return set(_SITE.findall(text))
