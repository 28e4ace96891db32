"""Which models there are: each family registers itself, in a file below `families/`."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Protocol

from ..jit.variant import Variant
from .config import ModelConfig
from .config_fields import Fields, UnsupportedModelError
from .decoder import Decoder
from .kv_format import KVFormat
from .layout import DecoderLayout
from .parts import Loader
from .required_kernels import model_kernels
from .tower import Tower


class Kernels(Protocol):
    """Names kernels of a model."""

    def __call__(
        self,
        config: ModelConfig,
        *,
        cache_format: KVFormat | None = None,
        batch_invariant: bool = True,
    ) -> list[Variant]:
        """Return what a model of this shape launches beside its linear layers.

        `cache_format` is that of the KV cache; None is pages in the model's dtype.
        """


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
        text_defaults: of further fields that a `text_config` may omit; see `Tower`.
    """

    model_type: str
    architectures: tuple[str, ...]
    config: Callable[[Fields], ModelConfig]
    layout: Callable[[ModelConfig], DecoderLayout]
    load: Load
    kernels: Kernels = model_kernels
    defaults: Mapping[str, Any] = field(default_factory=dict)
    text_defaults: Mapping[str, Any] = field(default_factory=dict)


_families: dict[str, Family] = {}
_towers: dict[str, Tower] = {}


def register(model: Family | Tower) -> None:
    """Add a family, or a model with a text tower of some family.

    Raises:
        ValueError: when its model_type is taken.
    """
    name = model.model_type
    if name in _families or name in _towers:
        raise ValueError(f"model_type: got {name!r}, which is registered already")
    if isinstance(model, Family):
        _families[name] = model
    else:
        _towers[name] = model


def families() -> Mapping[str, Family]:
    """Return all families by their model_type."""
    _discover()
    return _families


def towers() -> Mapping[str, Tower]:
    """Return all models with a text tower by their model_type."""
    _discover()
    return _towers


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
    fields = decoder_fields(config, where)
    read = families()[fields.get("model_type")].config(fields)
    return replace(read, text_tower=config.get("model_type") in towers())


def decoder_fields(config: Mapping[str, Any], where: str = "config.json") -> Fields:
    """Return the fields of the decoder that `config.json` describes, with its family's defaults.

    Arguments are those of `read_config`.

    Raises:
        UnsupportedModelError: naming the field, for an architecture that is not implemented.
    """
    fields = Fields(where, config)
    tower = towers().get(fields.choice("model_type", *sorted({*families(), *towers()})))
    if tower is None:
        family = families()[fields.get("model_type")]
        _check_architectures(fields, family.architectures)
        return Fields(where, {**family.defaults, **config})
    _check_architectures(fields, tower.architectures)
    text = tower.text_fields(fields)
    family = families()[text.choice("model_type", *sorted(families()))]
    # Some files name those of the whole model there.
    _check_architectures(text, (*family.architectures, *tower.architectures))
    defaults = {**family.defaults, **family.text_defaults}
    return Fields(text.where, {**defaults, **text.fields})


def _check_architectures(fields: Fields, known: tuple[str, ...]) -> None:
    if not set(fields.strings("architectures")) <= set(known):
        raise fields.wrong("architectures", repr(list(known)))


@cache
def _discover() -> None:
    package = importlib.import_module(".families", __package__)
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        importlib.import_module(module.name)


__all__ = [
    "Family",
    "Kernels",
    "Load",
    "Tower",
    "UnsupportedModelError",
    "decoder_fields",
    "families",
    "family_of",
    "read_config",
    "register",
    "towers",
]
