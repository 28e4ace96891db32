"""Finds out in which format a checkpoint folder's linear layers and KV cache are stored."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

from .format import Format, Quantization, StoredSchemeOf
from .section import CONFIG_FILE, Section
from .storage.base import StoredScheme
from .storage.dense import unquantized
from .text_tower import spellings


def load_quantization(folder: Path, *, text_tower: bool = False) -> Quantization:
    """Read how a checkpoint's linear modules and KV cache are stored, without reading any weight.

    Args:
        folder: of the checkpoint.
        text_tower: whether it holds other towers, too. Configurations then name modules as one
            version of transformers or another does: each spelling counts.

    Raises:
        CheckpointError: when a configuration file is missing or malformed.
        UnsupportedCheckpointError: naming the field, for a format that is not implemented.
    """
    config = quantization_config(folder)
    if config is None:
        return Quantization(unquantized)
    known = formats()
    found = known[config.choice("quant_method", *known)].parse(config)
    if not text_tower:
        return found
    return replace(found, scheme_of=partial(_any_spelling, found.scheme_of))


def _any_spelling(scheme_of: StoredSchemeOf, *names: str) -> StoredScheme:
    return scheme_of(*(spelt for name in names for spelt in spellings(name)))


def quantization_config(folder: Path) -> Section | None:
    """Return the object that describes a checkpoint's quantisation, None when it is plain.

    Raises:
        CheckpointError: when a configuration file is missing or malformed.
    """
    config = Section.read(folder / CONFIG_FILE)
    if config.get("quantization_config"):
        return config.child("quantization_config")
    for name, known in formats().items():
        found = known.find(config, folder)
        if found is not None:
            return Section(found.where, {"quant_method": name, **found.fields})
    return None


@cache
def formats() -> Mapping[str, Format]:
    """Return all formats by their `quant_method`."""
    package = importlib.import_module(".formats", __package__)
    names = sorted(module.name for module in pkgutil.iter_modules(package.__path__))
    found = [importlib.import_module(f"{package.__name__}.{name}").FORMAT for name in names]
    return {item.method: item for item in found}
