"""An FP8 product with block scales in Triton, of the kind that vLLM and SGLang fall back to.

Tiles of the output, 128 of K at a time, promoted to fp32 sums; tiles are chosen by Triton's
autotuner.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch

from ostinato.bench.gemm.cases import Case
from ostinato.bench.gemm.inputs import Inputs, Layout
from ostinato.bench.harness.benchmark import Implementation
from ostinato.ops.linear.gemm_variants import BLOCK_E4M3

try:
    import triton
    from triton import language as tl  # a global, by whose name Triton's compiler finds it
except ImportError:  # the adapter is loaded wherever peers are named
    triton = None


def peers(section: str, environ: Mapping[str, str]) -> list[Implementation[Any, Any]]:
    """Return the implementation for `bench gemm`."""
    if section != "gemm":
        return []
    return [Implementation("tri_blk", Layout(BLOCK_E4M3), _bind, prepare=_kernel, package="triton")]


@cache
def _kernel() -> Any:
    if triton is None:
        raise ImportError("triton is not installed")
    configs = [
        triton.Config({"BM": bm, "BN": bn, "GROUP_M": 32}, num_warps=warps, num_stages=stages)
        for bm, bn, warps, stages in (
            *((16, 32, 4, 5), (16, 64, 4, 5), (16, 128, 4, 5), (32, 64, 4, 5)),
            *((64, 32, 4, 5), (64, 64, 4, 4), (64, 128, 4, 4), (128, 128, 8, 3)),
            (128, 128, 4, 3),
        )
    ]
    return triton.autotune(configs=configs, key=["M", "N", "K"])(triton.jit(_block_product))


def _block_product(  # type: ignore[no-untyped-def]
    a, b, c, a_scale, b_scale, M, N, K, stride_group, BM: tl.constexpr, BN: tl.constexpr,
    GROUP_M: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    rows, columns = tl.cdiv(M, BM), tl.cdiv(N, BN)
    in_group = GROUP_M * columns
    first = pid // in_group * GROUP_M
    size = min(rows - first, GROUP_M)
    row, column = first + pid % in_group % size, pid % in_group // size
    m = (row * BM + tl.arange(0, BM)) % M
    n = (column * BN + tl.arange(0, BN)) % N
    k = tl.arange(0, 128)
    a_at = a + m[:, None] * K + k[None, :]
    b_at = b + n[None, :] * K + k[:, None]
    groups = tl.cdiv(K, 128)
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for group in range(groups):
        left = K - group * 128
        x = tl.load(a_at, mask=k[None, :] < left, other=0.0)
        w = tl.load(b_at, mask=k[:, None] < left, other=0.0)
        of_x = tl.load(a_scale + group * stride_group + m)
        of_w = tl.load(b_scale + n // 128 * groups + group)
        total += tl.dot(x, w) * of_x[:, None] * of_w[None, :]
        a_at += 128
        b_at += 128
    m = row * BM + tl.arange(0, BM)
    n = column * BN + tl.arange(0, BN)
    inside = (m[:, None] < M) & (n[None, :] < N)
    tl.store(c + m[:, None] * N + n[None, :], total.to(c.dtype.element_ty), mask=inside)


def _bind(case: Case, sets: Sequence[Inputs]) -> Sequence[Callable[[], torch.Tensor]]:
    kernel, m, (n, k) = _kernel(), case.m, (case.shape.n, case.shape.k)

    def bound(s: Inputs) -> Callable[[], torch.Tensor]:
        assert s.weight.blocks is not None
        blocks = s.weight.blocks.contiguous()

        def grid(chosen: Any) -> tuple[int]:
            return (-(-m // chosen["BM"]) * -(-n // chosen["BN"]),)

        def call() -> torch.Tensor:
            stride = s.x_scale.stride(0) if s.x_scale.size(0) > 1 else m
            operands = (s.x, s.weight.plain, s.out, s.x_scale, blocks)
            kernel[grid](*operands, m, n, k, stride)
            return s.out

        return call

    calls = [bound(one) for one in sets]
    calls[0]()  # tunes, which no capture could
    return calls
