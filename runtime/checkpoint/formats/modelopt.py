"""NVIDIA ModelOpt's 8-bit formats: FP8 per tensor, token or block, INT8 of SmoothQuant."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import translate
from pathlib import Path

import torch

from ...models.modules import Module, TensorSpec
from ..exclusions import all_but
from ..files import is_there
from ..format import Format, Quantization
from ..section import Section
from ..storage.base import StoredScheme
from ..storage.fp8_block import BLOCK, FP8BlockScheme
from ..storage.kv_cache import kv_cache_scheme
from ..storage.w8a8 import W8A8Scheme

_IN_BLOCKS = "FP8_PB_WO"
_FILE = "hf_quant_config.json"


@dataclass(frozen=True)
class _SmoothQuantScheme(W8A8Scheme):
    """INT8 whose activations may need a factor for each column before they are quantised."""

    def tensors(self, module: Module) -> Iterator[TensorSpec]:
        """Yield every tensor of the module; the weight is the first."""
        yield from super().tensors(module)
        yield self.input_factors(module)

    def input_factors(self, module: Module) -> TensorSpec:
        """Return the factors, which are 1 where the file does not hold them."""
        names = (f"{module.name}.pre_quant_scale",)
        return TensorSpec(names, ((module.columns,),), required=False)


_SCHEMES: dict[str, StoredScheme] = {
    "FP8": W8A8Scheme(torch.float8_e4m3fn, per_channel=False, static_input=True),
    "FP8_PER_CHANNEL_PER_TOKEN": W8A8Scheme(
        torch.float8_e4m3fn, per_channel=True, static_input=False
    ),
    _IN_BLOCKS: FP8BlockScheme(),
    "W8A8_SQ_PER_CHANNEL": _SmoothQuantScheme(torch.int8, per_channel=True, static_input=True),
}


def parse_modelopt(config: Section) -> Quantization:
    """Return the schemes of linear modules and KV cache of a ModelOpt configuration.

    Args:
        config: `quantization_config` of config.json, or `quantization` of hf_quant_config.json.

    Raises:
        CheckpointError: when the configuration is malformed.
        UnsupportedCheckpointError: naming the field, for any algorithm but "FP8" (static scales
            per tensor), "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO" (weights in blocks; activations
            are quantised by groups of 128 at run time, as other runtimes do) and
            "W8A8_SQ_PER_CHANNEL" (INT8 weights per channel, static scales of activations, whose
            factors `pre_quant_scale` loading folds into what is in front of the layer), and for a
            KV cache that is neither INT8 nor FP8.
    """
    algorithm = config.choice("quant_algo", *_SCHEMES)
    if algorithm == _IN_BLOCKS:
        config.choice("group_size", BLOCK, default=BLOCK)
    kv_cache = kv_cache_scheme(config)
    ignore = config.strings("exclude_modules", "ignore")
    config.reject_others("quant_method", "config_groups", "producer")
    scheme = _SCHEMES[algorithm]

    scheme_of = all_but([_regex(entry) for entry in ignore], scheme, config.where)
    return Quantization(scheme_of, kv_cache)


def _regex(entry: str) -> str:
    """Return the regular expression of a ModelOpt wildcard, or of a part of modules' names."""
    return rf"{translate(entry)}|(?:.*\.)?{re.escape(entry)}(?:\.|$)"


def _find(config: Section, folder: Path) -> Section | None:
    """Return the configuration in a file of its own, None without one."""
    file = folder / _FILE
    return Section.read(file).child("quantization") if is_there(file) else None


FORMAT = Format("modelopt", parse_modelopt, _find)
