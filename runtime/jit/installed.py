"""Compiled libraries of the package ostinato-kernels: a folder of entries in the cache's format."""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path

PACKAGE = "ostinato_kernels"


@cache
def installed_folder() -> Path | None:
    """Return the folder of the installed libraries, None when the package is not installed.

    It is trusted as this package is, whoever owns it: Python runs what lies beside it.
    """
    spec = importlib.util.find_spec(PACKAGE)
    # Without an origin it is a namespace: any folder of that name.
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).parent / "libraries"
