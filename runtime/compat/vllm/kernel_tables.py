"""Our linear kernels in front of those that vLLM chooses from."""

from __future__ import annotations

from vllm.model_executor.kernels import linear
from vllm.platforms import PlatformEnum

from .fp8_block_kernel import OstinatoFp8BlockLinearKernel
from .fp8_kernel import OstinatoFP8LinearKernel
from .int8_kernel import OstinatoInt8LinearKernel

_TABLES = (
    (linear._POSSIBLE_INT8_KERNELS, OstinatoInt8LinearKernel),
    (linear._POSSIBLE_FP8_KERNELS, OstinatoFP8LinearKernel),
    (linear._POSSIBLE_FP8_BLOCK_KERNELS, OstinatoFp8BlockLinearKernel),
)


def register() -> None:
    """Put each kernel first of its kind for CUDA, once.

    `register_linear_kernel` of vLLM appends, and what is behind CUTLASS is never chosen.
    """
    for table, kernel in _TABLES:
        kernels = table[PlatformEnum.CUDA]
        if kernel not in kernels:
            kernels.insert(0, kernel)
