"""Which kernels exist: one frozen dataclass per family, one instance per library to compile.

A variant is a fixed source file and the macros it is compiled with; the file's head says what each
macro means. `ostinato.jit.catalogue` lists the variants that the ops use.
"""

from .attention import (
    SPLIT_TOKENS,
    AttentionDecode,
    AttentionPrefill,
    DecodeLoad,
    decode_cluster,
)
from .base import (
    FLOAT_DTYPES,
    OPERAND_DTYPES,
    Variant,
)
from .gemm import (
    FusedLinear,
    GemmSmallM,
    GemmTiled,
)
from .names import variant_of
from .rows import (
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
