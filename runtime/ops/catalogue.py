"""The variants of all ops: every module of this package is imported, and names its own.

A new op needs no entry here.
"""

from __future__ import annotations

import pkgutil
from importlib import import_module

from ..jit.registry import registered
from ..jit.variant import Variant


def _every_variant() -> tuple[Variant, ...]:
    package = import_module(__package__)
    for module in pkgutil.walk_packages(package.__path__, f"{__package__}."):
        if module.name != __name__:
            import_module(module.name)
    return registered()


CATALOGUE: tuple[Variant, ...] = _every_variant()
