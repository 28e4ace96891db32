"""Names of C++ functions as their source has them."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any


@lru_cache(maxsize=4096)
def demangle(name: str) -> str:
    """Return the C++ name of a mangled one; what is not mangled, or cannot be undone, as it is."""
    function = _demangler()
    if function is None or not name.startswith("_Z"):
        return name
    status = ctypes.c_int()
    text = function(name.encode(), None, None, ctypes.byref(status))
    if not text:
        return name
    try:
        return ctypes.string_at(text).decode()
    finally:
        ctypes.CDLL(None).free(ctypes.c_void_p(text))


@lru_cache(maxsize=1)
def _demangler() -> Any:
    """Return `__cxa_demangle` of the C++ library that torch has loaded anyway."""
    try:
        function = ctypes.CDLL("libstdc++.so.6").__cxa_demangle
    except (OSError, AttributeError):
        return None
    function.restype = ctypes.c_void_p
    return function
