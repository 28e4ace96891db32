"""Documents that are there whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Write `text` to `path`; a reader sees the old content or the new one, never a part.

    Raises:
        OSError: when it cannot be written; the old content is still there.
    """
    if path.exists() and not path.is_file():  # a folder, which fails here, or a device
        path.write_text(text, encoding="utf-8")
        return
    target = path.resolve()  # what a link points to changes, not the link
    unfinished = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(target)
    finally:
        unfinished.unlink(missing_ok=True)
