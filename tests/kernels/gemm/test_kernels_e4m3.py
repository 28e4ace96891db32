"""Rounding to e4m3 without the instruction (csrc/common/e4m3.cuh), compiled for the host."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from ostinato.jit.sources import CSRC
from ostinato.jit.toolchain import require_nvcc

_TRIED = 6 * (1 << 16) + -(-(1 << 32) // 1021)


@pytest.mark.nvcc
def test_every_16_bit_float_and_millions_of_others(tmp_path: Path) -> None:
    program, source = tmp_path / "round", Path(__file__).with_name("round_to_e4m3.cpp")
    emulation = Path(__file__).parents[1] / "emulation"
    flags = ["-x", "c++", "-std=c++20", "-O2", "-w", "-cudart", "none"]
    includes = [f"-I{CSRC}", f"-I{emulation}"]
    command = [str(require_nvcc().path), *flags, *includes, str(source), "-o", str(program)]
    subprocess.run(command, check=True, timeout=120)
    printed = subprocess.run([program], check=True, capture_output=True, text=True, timeout=60)
    assert printed.stdout == f"{_TRIED}\n"
