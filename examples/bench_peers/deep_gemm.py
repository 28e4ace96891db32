"""DeepGEMM's FP8 products with block scales, compiled by nvcc when they are first called.

Either the package of that name or the copy in vLLM's wheel.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from types import ModuleType
from typing import Any

import torch

from ostinato.bench.gemm.cases import Case
from ostinato.bench.gemm.inputs import Inputs, Layout
from ostinato.bench.harness.benchmark import Implementation
from ostinato.ops.linear.gemm_variants import BLOCK_E4M3

_PLACES = ("deep_gemm", "vllm.third_party.deep_gemm")


def peers(section: str, environ: Mapping[str, str]) -> list[Implementation[Any, Any]]:
    """Return the implementation for `bench gemm`."""
    if section != "gemm":
        return []
    return [Implementation("dg_blk", Layout(BLOCK_E4M3), _bind, prepare=_library)]


@cache
def _library() -> ModuleType:
    errors = []
    for place in _PLACES:
        try:
            return importlib.import_module(place)
        except ImportError as error:
            errors.append(f"{place}: {error}")
    raise ImportError("; ".join(errors))


def _bind(case: Case, sets: Sequence[Inputs]) -> Sequence[Callable[[], torch.Tensor]]:
    library = _library()

    def bound(s: Inputs) -> Callable[[], torch.Tensor]:
        # Scales of x by token, in memory by group, at multiples of 16 bytes.
        x_scale = library.get_mn_major_tma_aligned_tensor(s.x_scale.t().contiguous())
        x, w = (s.x, x_scale), (s.weight.plain, s.weight.blocks)

        def call() -> torch.Tensor:
            library.fp8_gemm_nt(x, w, s.out, disable_ue8m0_cast=True)
            return s.out

        return call

    return [bound(one) for one in sets]
