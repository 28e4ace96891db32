"""Who multiplies: our op, and the peers it is compared with."""

from __future__ import annotations

import ctypes
import importlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import torch

from ... import ops
from ...jit.variant import Variant
from ...ops.common.device import (
    device_index,
    gpu,
)
from ...ops.common.pdl import pdl
from ...ops.linear import tile_tuning
from ..comparison import OURS
from .cases import Case
from .inputs import (
    OUT_DTYPE,
    Inputs,
)

DTYPES = {"int8": "int8", "fp8": "e4m3"}  # as the command line and the rows call operands
SGL_LIBRARY = "OSTINATO_SGL_LIBRARY"


@dataclass(frozen=True)
class Implementation:
    """A way to multiply.

    Args:
        name: as the rows call it.
        operand: dtype of x and w.
        call: multiplies one set of inputs and returns the result [m, n].
        scaled: whether the result is scaled by x_scale and w_scale.
        min_m: the fewest tokens it takes.
        prepare: makes it ready; raises `OSError` or `ImportError` where it is not installed.
    """

    name: str
    operand: str
    call: Callable[[Inputs], torch.Tensor]
    scaled: bool = True
    min_m: int = 1
    prepare: Callable[[], object] = lambda: None

    @property
    def is_ours(self) -> bool:
        return self.name.startswith(OURS)

    def num_bytes(self, m: int, n: int, k: int) -> int:
        """Unique bytes read and written."""
        operand = 2 if self.operand == "bf16" else 1
        result = 4 if self.name == "int_mm" else OUT_DTYPE.itemsize
        return operand * (m * k + n * k) + result * m * n + (4 * (m + n) if self.scaled else 0)


def ours(dtype: str, *, with_pdl: bool) -> Implementation:
    """Return our op for a dtype in `DTYPES`, launched with or without PDL."""
    name = f"{OURS}{dtype}" if with_pdl else f"{OURS}{dtype}_nopdl"
    return Implementation(name, DTYPES[dtype], _with_pdl if with_pdl else _without_pdl)


def kernel(case: Case, operand: str, device: torch.device) -> Variant:
    """Return the kernel that our op takes for a case with these operands."""
    name, sms = gpu(device_index(device))
    n, k = case.shape.n, case.shape.k
    choice = tile_tuning.choose(name, sms, case.m, n, k, operand, "bf16", True, True, False)
    return choice.variant


def peers(names: Sequence[str], sgl_library: Path | None = None) -> list[Implementation]:
    """Return the peers of these names.

    Args:
        names: in `PEERS`.
        sgl_library: file of sglang-kernel's ops; OSTINATO_SGL_LIBRARY, or else the installed
            package, by default.

    Raises:
        ValueError: for an unknown name.
    """
    for name in names:
        if name not in PEERS:
            raise ValueError(f"got {name!r}, expected all or none or {' or '.join(PEERS)}")
    load = partial(_load_sgl, sgl_library or os.environ.get(SGL_LIBRARY))
    known = (
        Implementation("sgl_i8", "int8", _sgl_int8, prepare=load),
        Implementation("sgl_f8", "e4m3", _sgl_fp8, prepare=load),
        Implementation("smm_row", "e4m3", _scaled_mm_rowwise),
        Implementation("smm_ten", "e4m3", _scaled_mm_tensorwise, scaled=False),
        Implementation("int_mm", "int8", _int_mm, scaled=False, min_m=17),
        Implementation("bf16", "bf16", _bf16, scaled=False),
    )
    return [peer for peer in known if peer.name in names]


# Those that do what ours does; the other two are shown beside them.
W8A8_PEERS = ("sgl_i8", "sgl_f8", "smm_row", "smm_ten")
PEERS = (*W8A8_PEERS, "int_mm", "bf16")


def _with_pdl(s: Inputs) -> torch.Tensor:
    return ops.w8a8_linear(s.x, s.packed, s.x_scale, s.weight.scale, out=s.out, fast_accum=True)


def _without_pdl(s: Inputs) -> torch.Tensor:
    with pdl(False):
        return _with_pdl(s)


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


def _scaled_mm_rowwise(s: Inputs) -> torch.Tensor:
    return torch._scaled_mm(
        s.x,
        s.weight.plain.t(),
        s.x_scale.unsqueeze(1),
        s.weight.scale.unsqueeze(0),
        out_dtype=OUT_DTYPE,
        use_fast_accum=True,
    )


def _scaled_mm_tensorwise(s: Inputs) -> torch.Tensor:
    one = _one(s.x.device)
    return torch._scaled_mm(
        s.x, s.weight.plain.t(), one, one, out_dtype=OUT_DTYPE, use_fast_accum=True
    )


def _int_mm(s: Inputs) -> torch.Tensor:
    return torch._int_mm(s.x, s.weight.plain.t())


def _bf16(s: Inputs) -> torch.Tensor:
    return torch.mm(s.x, s.weight.plain.t())


@cache
def _one(device: torch.device) -> torch.Tensor:
    return torch.ones((), device=device)


@cache
def _load_sgl(library: str | Path | None) -> None:
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
