"""NVIDIA ModelOpt's FP8: static scales per tensor."""

from __future__ import annotations

import re
from fnmatch import translate
from functools import cache
from pathlib import Path

import torch

from ..files import is_there
from ..format import Format, StoredSchemeOf
from ..kv_cache import kv_cache_scheme
from ..patterns import PatternMatcher
from ..section import Section
from ..storage.base import StoredScheme
from ..storage.dense import DENSE
from ..storage.w8a8 import W8A8Scheme

_FILE = "hf_quant_config.json"
# The output projection is in 16 bits whether or not the configuration lists it.
_OUTPUT = "lm_head"


def parse_modelopt(config: Section) -> StoredSchemeOf:
    """Return the scheme of every linear module under a ModelOpt configuration.

    Args:
        config: `quantization_config` of config.json, or `quantization` of hf_quant_config.json.

    Raises:
        CheckpointError: when the configuration is malformed.
        UnsupportedCheckpointError: naming the field, for any algorithm but "FP8" (static scales
            per tensor), and for a KV cache that is neither INT8 nor FP8.
    """
    config.choice("quant_algo", "FP8")
    kv_cache_scheme(config)
    ignore = config.strings("exclude_modules", "ignore")
    config.reject_others("quant_method", "config_groups", "producer")
    scheme = W8A8Scheme(torch.float8_e4m3fn, per_channel=False, static_input=True)

    matcher = PatternMatcher(config.where)
    patterns = [_regex(entry) for entry in ignore]

    @cache
    def scheme_of(*names: str) -> StoredScheme:
        ignored = any(matcher.matches(pattern, name) for pattern in patterns for name in names)
        return DENSE if ignored or _OUTPUT in names else scheme

    return scheme_of


def _regex(entry: str) -> str:
    """Return the regular expression of a ModelOpt wildcard, or of a part of modules' names."""
    return rf"{translate(entry)}|(?:.*\.)?{re.escape(entry)}(?:\.|$)"


def _find(config: Section, folder: Path) -> Section | None:
    """Return the configuration in a file of its own, None without one."""
    file = folder / _FILE
    return Section.read(file).child("quantization") if is_there(file) else None


FORMAT = Format("modelopt", parse_modelopt, _find)
