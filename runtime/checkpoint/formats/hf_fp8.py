"""Hugging Face's `fp8`: one weight scale per tensor."""

from __future__ import annotations

import torch

from ..exclusions import all_but
from ..format import Format, StoredSchemeOf
from ..kv_cache import kv_cache_scheme
from ..patterns import transformers_pattern
from ..section import Section
from ..storage.w8a8 import W8A8Scheme


def parse_hf_fp8(config: Section) -> StoredSchemeOf:
    """Return the scheme of every linear module under `quant_method` "fp8".

    Weights have one scale per tensor, activations a static one or none; with none they are
    quantised per token. An entry of `ignored_layers` or `modules_to_not_convert` means a module,
    everything inside it, and every module whose name ends with it, and may be a regular
    expression, as in transformers.

    Raises:
        CheckpointError: when the configuration is malformed.
        UnsupportedCheckpointError: naming the field, for block scales or another extension.
    """
    config.reject(
        "weight_block_size", "block FP8 is not supported, only one weight scale per tensor"
    )
    static = config.choice("activation_scheme", "static", "dynamic") == "static"
    config.choice("fmt", "e4m3", default="e4m3")
    config.choice("scale_fmt", "float", default="float")
    kv_cache_scheme(config)
    ignored = config.strings("ignored_layers", "modules_to_not_convert")
    config.reject_others("quant_method", "expert_dtype")
    ignore = [transformers_pattern(entry) for entry in ignored]
    scheme = W8A8Scheme(torch.float8_e4m3fn, per_channel=False, static_input=static)
    return all_but(ignore, scheme, config.where)


FORMAT = Format("fp8", parse_hf_fp8)
