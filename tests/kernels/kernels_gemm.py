"""GEMM kernels without the ops before them: launches, guarded outputs, an exact reference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch

from ostinato import _C, ops
from ostinato.jit.compiler import build, plan
from ostinato.jit.mode import BuildMode
from ostinato.jit.variant import Variant
from ostinato.ops.common.device import address_of

Kind = TypeVar("Kind", bound=Variant)


def load(wanted: Sequence[tuple[Kind, BuildMode]]) -> dict[tuple[Kind, BuildMode], _C.Library]:
    """Return the libraries of these variants and modes, compiled and ready to be launched."""
    entries = build([plan(variant, mode) for variant, mode in wanted])
    libraries = {key: _C.Library(str(e.library)) for key, e in zip(wanted, entries, strict=True)}
    for library in libraries.values():
        library.prepare()
    return libraries


def random_codes(m: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return INT8 x [m, k] and w [n, k]."""
    x, w = (torch.randint(-127, 128, (rows, k), dtype=torch.int8) for rows in (m, n))
    return x.cuda(), w.cuda()


def launch(
    library: _C.Library,
    x: torch.Tensor,
    w: ops.PackedWeight,
    x_scale: torch.Tensor | None,
    w_scale: torch.Tensor | None,
    out: torch.Tensor,
    **more: int,
) -> None:
    """Launch the product of x [m, k] and w [n, k], with a scale for each row of both, or none.

    `more` are other arguments of the launch: how the kernel cuts the output, for one.
    """
    library.launch(
        x=x.data_ptr(),
        x_stride=x.stride(0),
        w=w.data.data_ptr(),
        w_stride=0,
        x_scale=address_of(x_scale),
        x_scale_stride=1,
        w_scale=address_of(w_scale),
        w_scale_stride=1,
        out=out.data_ptr(),
        out_stride=out.stride(0),
        m=x.size(0),
        n=w.n,
        k=x.size(1),
        stream=torch.cuda.current_stream().cuda_stream,
        pdl=True,
        **more,
    )


def multiply(library: _C.Library, x: torch.Tensor, w: torch.Tensor, **cut: int) -> torch.Tensor:
    """Return the bf16 product of x and w (packed for it), with the scales and bias of `exact`.

    Args:
        library: a kernel with bf16 output.
        x: [m, k] codes.
        w: [n, k] codes.
        cut: how the kernel cuts the output.

    Raises:
        AssertionError: the kernel wrote outside its output.
    """
    x_scale, w_scale, bias = _constants(x.size(0), w.size(0))
    return _guarded(library, x, w, x_scale, w_scale, bias, **cut)


def multiply_16_bit(
    library: _C.Library, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor, **cut: int
) -> torch.Tensor:
    """Return x·wᵀ + bias as `multiply` does, in the dtype of the bias, which is the kernel's."""
    return _guarded(library, x, w, None, None, bias, **cut)


def _guarded(
    library: _C.Library,
    x: torch.Tensor,
    w: torch.Tensor,
    x_scale: torch.Tensor | None,
    w_scale: torch.Tensor | None,
    bias: torch.Tensor,
    **cut: int,
) -> torch.Tensor:
    m, n = x.size(0), w.size(0)
    guarded = torch.full((m + 2, n + 16), 99.0, dtype=bias.dtype, device="cuda")
    out = guarded[1 : m + 1, 8 : n + 8].fill_(torch.nan)
    launch(library, x, ops.pack_weight(w), x_scale, w_scale, out, bias=bias.data_ptr(), **cut)
    whole = guarded.clone()
    whole[1 : m + 1, 8 : n + 8] = 99.0
    assert (whole == 99.0).all(), "written outside out"
    return out


def exact(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Return what `multiply` must for INT8: exact sums, scaled in fp32 and rounded once."""
    x_scale, w_scale, bias = _constants(x.size(0), w.size(0))
    scaled = w_scale * (x.double() @ w.double().t()).float()
    return (x_scale.double()[:, None] * scaled.double() + bias.double()).float().bfloat16()


def _constants(m: int, n: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x_scale = torch.linspace(0.01, 0.02, m, device="cuda")
    w_scale = torch.linspace(0.02, 0.03, n, device="cuda")
    return x_scale, w_scale, torch.linspace(-1, 1, n, device="cuda").bfloat16()
