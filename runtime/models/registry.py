"""Which model families there are: each registers itself, in a file of `families/`."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Protocol

from ..jit.variant import Variant
from .config import ModelConfig
from .config_fields import Fields, UnsupportedModelError
from .decoder import Decoder
from .parts import DecoderLayout, Loader
from .required_kernels import model_kernels


class Kernels(Protocol):
    """Names kernels of a model."""

    def __call__(self, config: ModelConfig, *, batch_invariant: bool = True) -> list[Variant]:
        """Return what a model of this shape launches beside its linear layers."""


class Load(Protocol):
    """Makes a decoder of its parts."""

    def __call__(
        self,
        config: ModelConfig,
        parts: DecoderLayout,
        loader: Loader,
        *,
        max_context: int | None = None,
        batch_invariant: bool = True,
    ) -> Decoder:
        """Return the decoder; ValueError for a `max_context` that the model does not have."""


@dataclass(frozen=True)
class Family:
    """Models that are described and computed alike.

    Args:
        model_type: of their config.json.
        architectures: that it may name.
        config: reads the fields of config.json; it refuses what is not implemented.
        layout: the parts of a decoder of some shape.
        load: makes the decoder.
        kernels: names the kernels beside those of linear layers.
        defaults: of fields that transformers fills in for this family.
    """

    model_type: str
    architectures: tuple[str, ...]
    config: Callable[[Fields], ModelConfig]
    layout: Callable[[ModelConfig], DecoderLayout]
    load: Load
    kernels: Kernels = model_kernels
    defaults: Mapping[str, Any] = field(default_factory=dict)


_families: dict[str, Family] = {}


def register(family: Family) -> None:
    """Add a family.

    Raises:
        ValueError: when its model_type is taken.
    """
    if family.model_type in _families:
        raise ValueError(f"model_type: got {family.model_type!r}, which is registered already")
    _families[family.model_type] = family


def families() -> Mapping[str, Family]:
    """Return all families by their model_type."""
    _discover()
    return _families


def family_of(config: ModelConfig) -> Family:
    """Return the family of a model."""
    return families()[config.family]


def read_config(config: Mapping[str, Any], where: str = "config.json") -> ModelConfig:
    """Translate the contents of `config.json`, of transformers 4 or 5.

    Fields that transformers fills in differently from family to family, and that change the
    computation, must be written; other absent ones get its defaults.

    Args:
        config: the contents.
        where: what they come from, for messages.

    Raises:
        UnsupportedModelError: naming the field, for an architecture, activation or RoPE scaling
            that this runtime does not implement, or a field that is missing or malformed.
    """
    known = families()
    family = known[Fields(where, config).choice("model_type", *sorted(known))]
    fields = Fields(where, {**family.defaults, **config})
    if not set(fields.strings("architectures")) <= set(family.architectures):
        raise fields.wrong("architectures", repr(list(family.architectures)))
    return family.config(fields)


@cache
def _discover() -> None:
    package = importlib.import_module(".families", __package__)
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{module.name}")


__all__ = [
    "Family",
    "Kernels",
    "Load",
    "UnsupportedModelError",
    "families",
    "family_of",
    "read_config",
    "register",
]
