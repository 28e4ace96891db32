"""Routing's source on the CPU: choices against sorting, and the rows and tiles of each expert."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from kernels_emulation import compile_cases, emulated_sources

from effort import effort
from ostinato.ops.moe.route_cuda import MoeRoute

pytestmark = pytest.mark.nvcc


@pytest.mark.parametrize("dtype", effort(["fp32"], ["fp32", "bf16", "fp16"]))
def test_every_schedule_gives_the_right_plan(dtype: str, tmp_path: Path) -> None:
    """With equal logits, NaN, infinities, padding, groups, and guards behind each output."""
    sources = emulated_sources(tmp_path / "csrc")
    program = tmp_path / "route"
    defines = {**MoeRoute(dtype=dtype).defines(), "OSTINATO_ABI": "0"}
    compile_cases(sources, "moe_route_cases.cpp", program, defines)
    command = [program, "0", str(effort(10, 80))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-3000:]
