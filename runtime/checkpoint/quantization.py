"""Finds out in which format a checkpoint folder's linear layers are stored."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from .compressed_tensors import parse_compressed_tensors
from .fp8 import parse_hf_fp8, parse_modelopt
from .scheme import SchemeOf, unquantized
from .section import Section

CONFIG_FILE = "config.json"
_MODELOPT_FILE = "hf_quant_config.json"

_PARSERS: dict[str, Callable[[Section], SchemeOf]] = {
    "compressed-tensors": parse_compressed_tensors,
    "fp8": parse_hf_fp8,
    "modelopt": parse_modelopt,
}


def load_quantization(folder: Path) -> SchemeOf:
    """Read how each linear module of a checkpoint is stored, without reading any weight.

    Raises:
        CheckpointError: when a configuration file is missing or malformed.
        UnsupportedCheckpointError: naming the field, for a format that is not implemented.
    """
    config = quantization_config(folder)
    if config is None:
        return unquantized
    method = config.choice("quant_method", *_PARSERS)
    return _PARSERS[method](config)


def quantization_config(folder: Path) -> Section | None:
    """Return the object that describes a checkpoint's quantisation, None when it is plain.

    Raises:
        CheckpointError: when a configuration file is missing or malformed.
    """
    config = Section.read(folder / CONFIG_FILE)
    if config.get("quantization_config"):
        return config.child("quantization_config")
    if config.get("compression_config"):
        return _with_method(config.child("compression_config"), "compressed-tensors")
    file = folder / _MODELOPT_FILE
    if file.exists():
        return _with_method(Section.read(file).child("quantization"), "modelopt")
    return None


def _with_method(config: Section, default: str) -> Section:
    return Section(config.where, {"quant_method": default, **config.fields})
