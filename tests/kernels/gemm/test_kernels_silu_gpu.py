"""The fast SiLU of the quantisation kernels: the compiler's bits for every gate it takes."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from ostinato.jit.sources import CSRC
from ostinato.jit.toolchain import find_nvcc

pytestmark = [pytest.mark.gpu, pytest.mark.nvcc]


def test_every_fp32_gate_has_the_bits_of_plain_operations(tmp_path: Path) -> None:
    nvcc, program = find_nvcc(), tmp_path / "silu"
    assert nvcc is not None
    command = [nvcc.path, "-std=c++17", "-O3", "-arch=sm_90a", f"-I{CSRC}"]
    source = Path(__file__).with_name("silu.cu")
    subprocess.run([*command, source, "-o", program], check=True)
    said = subprocess.run([program], check=True, capture_output=True, text=True).stdout
    assert said == "no error: 0\n"
