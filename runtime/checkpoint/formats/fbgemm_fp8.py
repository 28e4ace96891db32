"""transformers' `fbgemm_fp8`: FP8 weights with a scale per row, activations per token."""

from __future__ import annotations

import torch

from ..exclusions import all_but
from ..format import Format, Quantization
from ..patterns import transformers_pattern
from ..section import Section
from ..storage.w8a8 import W8A8Scheme


def parse_fbgemm_fp8(config: Section) -> Quantization:
    """Return the scheme of every linear module under `quant_method` "fbgemm_fp8".

    `activation_scale_ub`, at which FBGEMM cuts off the largest activation of a token, is not
    applied: the scale of a token is that of its largest activation, and none saturates. Entries of
    `modules_to_not_convert` mean what they do in "fp8".

    Raises:
        CheckpointError: when the configuration is malformed.
        UnsupportedCheckpointError: naming a field that is not known.
    """
    config.number("activation_scale_ub", 1200.0)
    ignored = config.strings("modules_to_not_convert")
    config.reject_others("quant_method")
    ignore = [transformers_pattern(entry) for entry in ignored]
    scheme = W8A8Scheme(torch.float8_e4m3fn, per_channel=True, static_input=False)
    return Quantization(all_but(ignore, scheme, config.where))


FORMAT = Format("fbgemm_fp8", parse_fbgemm_fp8)
