"""Which kernels exist: one frozen dataclass per family, one instance per library to compile.

A variant is a fixed source file and the macros it is compiled with; the file's head says what each
macro means. `ostinato.kernels.catalogue` lists the variants that the ops use.
"""

from ostinato.kernels.variants.attention import (
    SPLIT_TOKENS,
    AttentionDecode,
    AttentionPrefill,
    DecodeLoad,
    decode_cluster,
)
from ostinato.kernels.variants.base import FLOAT_DTYPES, OPERAND_DTYPES, Variant
from ostinato.kernels.variants.gemm import FusedLinear, GemmSmallM, GemmTiled
from ostinato.kernels.variants.names import variant_of
from ostinato.kernels.variants.rows import (
    QUANTIZE_KINDS,
    AppendKV,
    Embed,
    L2Probe,
    MergeStates,
    Quantize,
    Sample,
)

__all__ = [
    "FLOAT_DTYPES",
    "OPERAND_DTYPES",
    "QUANTIZE_KINDS",
    "SPLIT_TOKENS",
    "AppendKV",
    "AttentionDecode",
    "AttentionPrefill",
    "DecodeLoad",
    "Embed",
    "FusedLinear",
    "GemmSmallM",
    "GemmTiled",
    "L2Probe",
    "MergeStates",
    "Quantize",
    "Sample",
    "Variant",
    "decode_cluster",
    "variant_of",
]
