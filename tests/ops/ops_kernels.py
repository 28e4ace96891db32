"""Which sizes the GPU tests of W8A8 products cover, and which kernels the GPU tests launch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import torch

from ostinato.kernels.catalogue import (
    APPEND_KV,
    EMBED,
    FUSED_LINEAR,
    MERGE_STATES,
    QUANTIZE,
    SAMPLE,
)
from ostinato.kernels.variants import FLOAT_DTYPES, OPERAND_DTYPES, Variant
from ostinato.ops import gemm_table

# What the tests of products cover: the many sizes in bf16, the others at some sizes.
TOKENS = (
    *(0, 1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65),
    *(127, 128, 129, 255, 256, 257, 300, 1000),
)
FEW_TOKENS = (3, 9, 20, 70)
# What those of logits do: tokens, vocabularies and the features they are made of.
LOGITS_TOKENS, VOCABULARIES, LOGITS_FEATURES = (
    (1, 16, 17, 32, 48, 64, 100, 128, 200, 256),
    (1003, 32000),
    512,
)


def kernels_of_the_tests() -> Iterator[Variant]:
    yield from EMBED
    yield from APPEND_KV
    yield from MERGE_STATES
    yield from SAMPLE
    yield from FUSED_LINEAR
    for variant in QUANTIZE:
        yield variant
        if variant.kind == "rms_norm":
            yield replace(variant, weight_dtype="fp32")
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    for dtype, out_dtype in product(OPERAND_DTYPES, FLOAT_DTYPES):
        for m in TOKENS if out_dtype == "bf16" else FEW_TOKENS:
            for packed, fast_accum, invariant in product([False, True], repeat=3):
                if m and (fast_accum or out_dtype == "bf16"):
                    yield gemm_table.choose(
                        m,
                        1000,
                        1000,
                        dtype,
                        out_dtype,
                        packed=packed,
                        fast_accum=fast_accum,
                        batch_invariant=invariant,
                        sms=sms,
                    ).variant
    for dtype, m, n in product(OPERAND_DTYPES, LOGITS_TOKENS, VOCABULARIES):
        how = {"packed": True, "batch_invariant": True, "sms": sms}
        yield gemm_table.choose(m, n, LOGITS_FEATURES, dtype, "fp32", **how).variant
