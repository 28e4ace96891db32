"""The files that a kernel is compiled from."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

CSRC = Path(__file__).parent.parent / "csrc"
ENTRY = CSRC / "common" / "entry.cpp"
DEBUG = "common/debug.cuh"

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*["<]([^">]+)[">]', re.MULTILINE)
_CUTLASS = ("cutlass/", "cute/")


@dataclass(frozen=True)
class Sources:
    """A kernel's source and all headers of ours that it includes: name -> text, in name order.

    `uses_cutlass` says whether any of them includes a header of CUTLASS.
    """

    texts: dict[str, str]
    uses_cutlass: bool

    @property
    def parts(self) -> Iterable[str]:
        """Names and texts in turn, for a `digest`."""
        return (part for item in self.texts.items() for part in item)

    @property
    def own(self) -> list[str]:
        """The texts without debug.cuh, which defines the macros that the others use."""
        return [text for name, text in self.texts.items() if name != DEBUG]


def digest(texts: Iterable[str]) -> str:
    """Return 16 hexadecimal digits that stand for these texts, their order and their bounds."""
    found = hashlib.sha256()
    for text in texts:
        found.update(f"{len(text)}:".encode())
        found.update(text.encode())
    return found.hexdigest()[:16]


def read_sources(source: Path) -> Sources:
    """Follow the includes of a kernel's source and of the entry file that is compiled with it.

    Includes are followed whether or not the preprocessor would reach them: the result is what the
    library may depend on.

    Raises:
        FileNotFoundError: when there is no such source.
    """
    texts: dict[str, str] = {}
    uses_cutlass, root = False, os.path.abspath(CSRC)
    pending = [os.path.abspath(source), os.path.abspath(ENTRY)]
    while pending:
        file = pending.pop()
        name = _name(file, CSRC)
        if name in texts:
            continue
        # Dozens of kernels share headers, and a server looks up all of its own when it starts.
        texts[name], includes = _read(file, os.stat(file))
        for included in includes:
            uses_cutlass |= included.startswith(_CUTLASS)
            places = [os.path.join(at, included) for at in (os.path.dirname(file), root)]
            pending += [place for place in places if os.path.isfile(place)][:1]
    return Sources(dict(sorted(texts.items())), uses_cutlass)


def read_all() -> list[str]:
    """Return the text of every kernel and header of ours, less debug.cuh."""
    files = [*CSRC.rglob("*.cu"), *CSRC.rglob("*.cuh")]
    return [file.read_text(encoding="utf-8") for file in files if _name(str(file), CSRC) != DEBUG]


def _read(file: str, state: os.stat_result) -> tuple[str, tuple[str, ...]]:
    """Return the text of a file in that state, and what it includes."""
    # Of these an edit changes one at least, unless somebody sets the clock back.
    when = (state.st_ctime_ns, state.st_mtime_ns)
    return _read_once(file, state.st_dev, state.st_ino, state.st_size, *when)


@lru_cache(maxsize=1 << 10)
def _read_once(file: str, *_state: int) -> tuple[str, tuple[str, ...]]:
    text = Path(file).read_text(encoding="utf-8")
    return text, tuple(_INCLUDE.findall(text))


@lru_cache(maxsize=1 << 10)
def _name(file: str, root: Path) -> str:
    # Absolute, but with links kept: a strict editable install links every file by itself.
    path, folder = Path(os.path.abspath(file)), Path(os.path.abspath(root))
    return str(path.relative_to(folder)) if path.is_relative_to(folder) else path.name
