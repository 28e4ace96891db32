"""sglang-kernel's W8A8 products (CUTLASS).

With OSTINATO_SGL_LIBRARY (`bench gemm --sgl-library`) the ops are those of that file,
`sgl_kernel/sm90/common_ops.abi3.so` of the wheel; else those of the package `sgl_kernel`. The file
needs libnuma, which may lie beside it.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from ostinato.bench.gemm.inputs import OUT_DTYPE, Inputs, Layout
from ostinato.bench.harness.benchmark import Implementation, each

SGL_LIBRARY = "OSTINATO_SGL_LIBRARY"


def peers(section: str, environ: Mapping[str, str]) -> list[Implementation[Any, Any]]:
    """Return the implementations for `bench gemm`."""
    if section != "gemm":
        return []
    library = environ.get(SGL_LIBRARY)
    return [
        Implementation(
            name,
            Layout(operand),
            each(call),
            prepare=partial(load_sgl, library),
            package="sglang-kernel" if library is None else None,
        )
        for name, operand, call in (("sgl_i8", "int8", _sgl_int8), ("sgl_f8", "e4m3", _sgl_fp8))
    ]


def _sgl_int8(s: Inputs) -> torch.Tensor:
    weight = s.weight
    product: torch.Tensor = torch.ops.sgl_kernel.int8_scaled_mm(
        s.x, weight.plain.t(), s.x_scale, weight.scale, OUT_DTYPE, None
    )
    return product


def _sgl_fp8(s: Inputs) -> torch.Tensor:
    weight = s.weight
    product: torch.Tensor = torch.ops.sgl_kernel.fp8_scaled_mm(
        s.x, weight.plain.t(), s.x_scale, weight.scale, OUT_DTYPE, None
    )
    return product


@cache
def load_sgl(library: str | None) -> None:
    if library is None:
        importlib.import_module("sgl_kernel")
        return
    file = Path(library)
    if not file.is_file():
        raise FileNotFoundError(f"{file}: no such file")
    try:
        ctypes.CDLL("libnuma.so.1", mode=ctypes.RTLD_GLOBAL)
    except OSError:
        # A machine without the package may have the library beside the ops.
        ctypes.CDLL(str(file.absolute().with_name("libnuma.so.1")), mode=ctypes.RTLD_GLOBAL)
    torch.ops.load_library(str(file.absolute()))
