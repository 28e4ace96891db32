"""Hugging Face's `fp8`: one weight scale per tensor, or per block of 128 by 128."""

from __future__ import annotations

import torch

from ..exclusions import all_but
from ..format import Format, Quantization
from ..patterns import transformers_pattern
from ..section import Section
from ..storage.base import StoredScheme
from ..storage.fp8_block import BLOCK, FP8BlockScheme
from ..storage.kv_cache import kv_cache_scheme
from ..storage.w8a8 import W8A8Scheme


def parse_hf_fp8(config: Section) -> Quantization:
    """Return the schemes of linear modules and KV cache under `quant_method` "fp8".

    With `weight_block_size`, weights have a scale per block, and activations are quantised by
    groups of 128 at run time. Otherwise weights have one scale per tensor, activations a static one
    or none; with none they are quantised per token. An entry of `ignored_layers` or
    `modules_to_not_convert` means a module, everything inside it, and every module whose name ends
    with it, and may be a regular expression, as in transformers.

    Raises:
        CheckpointError: when the configuration is malformed.
        UnsupportedCheckpointError: naming the field, for other blocks or another extension.
    """
    in_blocks = config.get("weight_block_size") is not None
    if in_blocks:
        config.choice("weight_block_size", [BLOCK, BLOCK])
    activations = ("dynamic",) if in_blocks else ("static", "dynamic")
    static = config.choice("activation_scheme", *activations) == "static"
    config.choice("fmt", "e4m3", "float8_e4m3fn", default="e4m3")
    scales = ("float", "ue8m0") if in_blocks else ("float",)
    scale_format = config.choice("scale_fmt", *scales, default="float")
    kv_cache = kv_cache_scheme(config)
    ignored = config.strings("ignored_layers", "modules_to_not_convert")
    config.reject_others("quant_method", "expert_dtype")
    ignore = [transformers_pattern(entry) for entry in ignored]
    scheme: StoredScheme
    if in_blocks:
        scheme = FP8BlockScheme(power_of_two=scale_format == "ue8m0")
    else:
        scheme = W8A8Scheme(torch.float8_e4m3fn, per_channel=False, static_input=static)
    return Quantization(all_but(ignore, scheme, config.where), kv_cache)


FORMAT = Format("fp8", parse_hf_fp8)
