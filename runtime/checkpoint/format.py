"""What a weight format is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from .section import Section
from .storage.base import StoredScheme
from .storage.kv_cache import KVCacheScheme


class StoredSchemeOf(Protocol):
    """Maps a module to how it is stored."""

    def __call__(self, *names: str) -> StoredScheme:
        """Return it for a module that has these names, such as "model.layers.0.mlp.up_proj"."""


@dataclass(frozen=True)
class Quantization:
    """What a checkpoint's configuration says of how its numbers are stored.

    Args:
        scheme_of: how each linear module is.
        kv_cache: the 8-bit KV cache that it is made for, None where it is made for none.
    """

    scheme_of: StoredSchemeOf
    kv_cache: KVCacheScheme | None = None


def nowhere_else(_config: Section, _folder: Path) -> Section | None:
    """Return None: the format is described in `quantization_config` alone."""
    return None


@dataclass(frozen=True)
class Format:
    """A weight format. Each file in `formats/` has one, in a variable FORMAT.

    Args:
        method: `quant_method` of the configuration.
        parse: reads the configuration. It raises CheckpointError when that is malformed,
            UnsupportedCheckpointError, naming the field, for what is not implemented.
        find: returns the configuration of a folder where it is not in `quantization_config`, None
            where there is none; it is given config.json and the folder.
    """

    method: str
    parse: Callable[[Section], Quantization]
    find: Callable[[Section, Path], Section | None] = nowhere_else
