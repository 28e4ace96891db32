"""The tiled GEMM compiles for every kind of operands and tiles: to PTX, without a GPU."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from effort import sampled
from ostinato.jit.compiler import plan
from ostinato.jit.toolchain import require_cutlass, require_nvcc
from ostinato.ops.linear.gemm_variants import GEMM_TILED, GemmTiled

pytestmark = pytest.mark.nvcc


def _kind(variant: GemmTiled) -> tuple[object, ...]:
    """Return what chooses between parts of the source."""
    return (
        *(variant.dtype, variant.fast_accum, variant.block_scales, variant.scale_channels),
        *(variant.token_rows, variant.pingpong, variant.tokens <= 16),
    )


_OF_KINDS = list({_kind(variant): variant for variant in GEMM_TILED}.values())


@pytest.mark.parametrize("variant", sampled(_OF_KINDS, 6), ids=lambda variant: variant.name)
def test_every_kind_of_tiled_kernel_compiles(variant: GemmTiled, tmp_path: Path) -> None:
    command = plan(variant).command(require_nvcc(), require_cutlass())
    ptx = [word for word in command if word != "-shared"]
    ptx = ptx[: ptx.index(str(variant.source)) + 1]
    target = tmp_path / "kernel.ptx"
    subprocess.run([*ptx, "-ptx", "-o", str(target)], check=True, timeout=100)
    assert "wgmma.mma_async" in target.read_text()
