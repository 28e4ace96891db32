"""Collectives' source on the CPU: ranks side by side, whose words arrive late and in any order."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from kernels_emulation import compile_cases, emulated_sources

from effort import effort

pytestmark = pytest.mark.nvcc


@pytest.mark.parametrize(
    ("dtype", "ranks", "vectors"),
    effort([("bf16", 4, 1)], [("bf16", 4, 1), ("fp16", 2, 4), ("fp32", 8, 2), ("bf16", 8, 1)]),
)
def test_every_schedule_gives_the_right_rows(
    dtype: str, ranks: int, vectors: int, tmp_path: Path
) -> None:
    """With NaN that look absent, padding, guards behind all, and a rank that ends before others."""
    sources = emulated_sources(tmp_path / "csrc")
    program = tmp_path / "collective"
    defines = {
        "OSTINATO_DTYPE": dtype,
        "OSTINATO_RANKS": str(ranks),
        "OSTINATO_VECTORS": str(vectors),
    }
    compile_cases(sources, "collective_cases.cpp", program, defines)
    for with_dead, count in (("0", effort(10, 12)), ("1", effort(2, 6))):
        command = [program, "0", str(count), with_dead]
        done = subprocess.run(command, capture_output=True, text=True, timeout=280)
        assert done.returncode == 0, done.stdout[-3000:]
