"""The per-tensor FP8 formats of Hugging Face (`fp8`) and NVIDIA ModelOpt."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase

import torch

from .errors import UnsupportedCheckpointError
from .scheme import LinearScheme, SchemeOf, match_regex
from .section import Section

# Both formats leave the output projection in 16 bits whether or not they list it.
_OUTPUT = "lm_head"


def parse_hf_fp8(config: Section) -> SchemeOf:
    """Return the scheme of every linear module under `quant_method` "fp8".

    Weights have one scale per tensor, activations a static one or none; with none they are
    quantised per token. An entry of `ignored_layers` or `modules_to_not_convert` means a module,
    everything inside it, and every module whose name ends with it, and may be a regular
    expression, as in transformers.

    Raises:
        CheckpointError: when the configuration is malformed.
        UnsupportedCheckpointError: naming the field, for block scales or another extension.
    """
    if config.get("weight_block_size") is not None:
        raise UnsupportedCheckpointError(
            f"{config.where}: weight_block_size: got {config.get('weight_block_size')!r}: "
            "block FP8 is not supported, only one weight scale per tensor"
        )
    static = config.choice("activation_scheme", "static", "dynamic") == "static"
    config.choice("fmt", "e4m3", default="e4m3")
    config.choice("scale_fmt", "float", default="float")
    config.choice("kv_cache_scheme", None)
    ignored = config.strings("ignored_layers", "modules_to_not_convert")
    config.reject_others("quant_method", "expert_dtype")
    ignore = [_regex(entry) for entry in ignored]
    scheme = LinearScheme(torch.float8_e4m3fn, per_channel=False, static_input=static)
    for pattern in ignore:
        match_regex(pattern, "", config.where)

    def scheme_of(module: str) -> LinearScheme | None:
        ignored = any(match_regex(pattern, module, config.where) for pattern in ignore)
        return None if ignored or module == _OUTPUT else scheme

    return scheme_of


def parse_modelopt(config: Section) -> SchemeOf:
    """Return the scheme of every linear module under a ModelOpt configuration.

    Args:
        config: `quantization_config` of config.json, or `quantization` of hf_quant_config.json.

    Raises:
        CheckpointError: when the configuration is malformed.
        UnsupportedCheckpointError: naming the field, for any algorithm but "FP8" (static scales
            per tensor) and for a quantised KV cache.
    """
    config.choice("quant_algo", "FP8")
    config.choice("kv_cache_quant_algo", None)
    config.choice("kv_cache_scheme", None)
    ignore = config.strings("exclude_modules", "ignore")
    config.reject_others("quant_method", "config_groups", "producer")
    scheme = LinearScheme(torch.float8_e4m3fn, per_channel=False, static_input=True)

    def scheme_of(module: str) -> LinearScheme | None:
        ignored = any(_excludes(entry, module) for entry in ignore)
        return None if ignored or module == _OUTPUT else scheme

    return scheme_of


def _regex(entry: str) -> str:
    entry = entry.removeprefix("re:")
    return rf"(?:{entry})(?:(?<=\.)|(?=\.|$))|.*{re.escape(entry)}$"


def _excludes(entry: str, module: str) -> bool:
    """Return whether a ModelOpt wildcard, or the name of a parent, means `module`."""
    return fnmatchcase(module, entry) or f".{entry}." in f".{module}."
